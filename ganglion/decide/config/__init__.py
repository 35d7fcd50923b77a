"""The run file: schema, reading, writing, recipes, and its resolution into a checked Plan.

Everything is decided from numbers, before a launch: no data are read and nothing is measured here.
"""

from ganglion.decide.config.checks import (
    DEFAULT_BETA,
    check_error_feedback,
    check_flushes,
    check_precision,
    given_rates,
    verdict_delay,
)
from ganglion.decide.config.files import (
    CHECKPOINTS,
    LOGS,
    MEMORY_FILE,
    METRICS_FILE,
    MODEL_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    QUICKSTART,
    RUN_FILE,
    RUNS,
    TENSORBOARD,
    TRACE,
    Override,
    known_keys,
    load_run_file,
    read_toml,
    recipe,
    render_run_file,
)
from ganglion.decide.config.model import (
    check_trainable,
    expected_shape,
    model_shape,
    own_code_key,
    read_model,
)
from ganglion.decide.config.resolve import check_plan, resolve
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
    "check_trainable",
    "check_vocabulary",
    "expected_shape",
    "given_rates",
    "known_keys",
    "load_run_file",
    "model_shape",
    "own_code_key",
    "read_model",
    "read_toml",
    "recipe",
    "render_run_file",
    "resolve",
    "verdict_delay",
]
