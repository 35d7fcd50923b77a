"""Predictions: time, memory and fit of a run file or plan, and measured values beside them."""

from ganglion.decide.predict.activation_budget import decide_activations
from ganglion.decide.predict.budget import Fit, fit_budget
from ganglion.decide.predict.comparison import Comparison, compare
from ganglion.decide.predict.expected import expected_shape
from ganglion.decide.predict.measured_memory import RankMemory, read_memory, write_memory
from ganglion.decide.predict.memory import MemoryOptions, predicted_memory, server_memory
from ganglion.decide.predict.model_times import model_times

__all__ = [
    "Comparison",
    "Fit",
    "MemoryOptions",
    "RankMemory",
    "compare",
    "decide_activations",
    "expected_shape",
    "fit_budget",
    "model_times",
    "predicted_memory",
    "read_memory",
    "server_memory",
    "write_memory",
]
