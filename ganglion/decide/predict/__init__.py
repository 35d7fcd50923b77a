"""Predictions: time, memory and fit of a run file or plan, and measured values beside them."""

from ganglion.decide.predict.activation_budget import decide_activations
from ganglion.decide.predict.budget import Fit, fit_budget
from ganglion.decide.predict.compare import print_comparison
from ganglion.decide.predict.expected import expected_shape
from ganglion.decide.predict.measured_memory import print_memory, write_memory
from ganglion.decide.predict.memory import MemoryOptions, predicted_memory, server_memory
from ganglion.decide.predict.model_times import model_times

__all__ = [
    "Fit",
    "MemoryOptions",
    "decide_activations",
    "expected_shape",
    "fit_budget",
    "model_times",
    "predicted_memory",
    "print_comparison",
    "print_memory",
    "server_memory",
    "write_memory",
]
