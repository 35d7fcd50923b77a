"""The run file: its schema, its reading and writing, and its resolution into a Plan."""

from ganglion.config.activation_budget import decide_activations
from ganglion.config.budget import Fit, fit_budget
from ganglion.config.expected import expected_shape
from ganglion.config.load import Override, known_keys, load_run_file, read_toml
from ganglion.config.memory import MemoryOptions, predicted_memory, server_memory
from ganglion.config.render import render_run_file
from ganglion.config.resolve import check_error_feedback, check_plan, model_shape, resolve
from ganglion.config.schema import RunFile
from ganglion.config.shapes import ConvShape, GPTShape, MLPShape, ModelShape

__all__ = [
    "ConvShape",
    "Fit",
    "GPTShape",
    "MLPShape",
    "MemoryOptions",
    "ModelShape",
    "Override",
    "RunFile",
    "check_error_feedback",
    "check_plan",
    "decide_activations",
    "expected_shape",
    "fit_budget",
    "known_keys",
    "load_run_file",
    "model_shape",
    "predicted_memory",
    "read_toml",
    "render_run_file",
    "resolve",
    "server_memory",
]
