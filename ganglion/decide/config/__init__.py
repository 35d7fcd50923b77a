"""The run file: schema, loading, recipes, and its resolution into a Plan with every check."""

from ganglion.decide.config.averaging_checks import (
    DEFAULT_BETA,
    check_flushes,
    given_rates,
)
from ganglion.decide.config.load import Override, known_keys, load_run_file, read_toml
from ganglion.decide.config.model import expected_shape, model_shape, own_code_key
from ganglion.decide.config.precision_checks import check_precision, verdict_delay
from ganglion.decide.config.recipes import QUICKSTART, recipe
from ganglion.decide.config.render import render_run_file
from ganglion.decide.config.resolve import check_error_feedback, check_plan, resolve
from ganglion.decide.config.run_folder import (
    CHECKPOINTS,
    LOGS,
    MEMORY_FILE,
    METRICS_FILE,
    MODEL_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    RUN_FILE,
    RUNS,
    TENSORBOARD,
    TRACE,
)
from ganglion.decide.config.schema import (
    AveragingSection,
    MemorySection,
    OptimizerSection,
    ParallelSection,
    RunFile,
)
from ganglion.decide.config.tensor_checks import check_vocabulary

__all__ = [
    "CHECKPOINTS",
    "DEFAULT_BETA",
    "LOGS",
    "MEMORY_FILE",
    "METRICS_FILE",
    "MODEL_FILE",
    "PLAN_FILE",
    "PREDICTION_FILE",
    "QUICKSTART",
    "RUNS",
    "RUN_FILE",
    "TENSORBOARD",
    "TRACE",
    "AveragingSection",
    "MemorySection",
    "OptimizerSection",
    "Override",
    "ParallelSection",
    "RunFile",
    "check_error_feedback",
    "check_flushes",
    "check_plan",
    "check_precision",
    "check_vocabulary",
    "expected_shape",
    "given_rates",
    "known_keys",
    "load_run_file",
    "model_shape",
    "own_code_key",
    "read_toml",
    "recipe",
    "render_run_file",
    "resolve",
    "verdict_delay",
]
