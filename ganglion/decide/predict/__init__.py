"""Predictions: time, memory and fit of a run file or plan, and measured values beside them.

Everything here returns records. Printing belongs to cli, and nothing is launched.
"""

from ganglion.decide.predict.budget import Fit, decide_activations, fit_budget
from ganglion.decide.predict.comparison import Comparison, compare
from ganglion.decide.predict.fitting import (
    FittedCluster,
    Measured,
    Residual,
    fit_cluster,
    together,
)
from ganglion.decide.predict.measured_memory import RankMemory, read_memory, write_memory
from ganglion.decide.predict.memory import predicted_memory, server_memory, state_rules
from ganglion.decide.predict.prediction import (
    MemoryFigures,
    MemoryRow,
    Prediction,
    num_cluster_ranks,
    planned_run,
    predict,
    predict_layout,
    predict_memory,
    read_source,
    shape_memory,
)
from ganglion.decide.predict.refine import (
    Change,
    Refined,
    refine,
    scaled_collectives,
    scaled_compute,
)
from ganglion.decide.predict.step_time import (
    StepFigures,
    StepSetting,
    model_times,
    planned_overlap,
    planned_times,
    predict_figures,
    predict_step,
)

__all__ = [
    "Change",
    "Comparison",
    "Fit",
    "FittedCluster",
    "Measured",
    "MemoryFigures",
    "MemoryRow",
    "Prediction",
    "RankMemory",
    "Refined",
    "Residual",
    "StepFigures",
    "StepSetting",
    "compare",
    "decide_activations",
    "fit_budget",
    "fit_cluster",
    "model_times",
    "num_cluster_ranks",
    "planned_overlap",
    "planned_run",
    "planned_times",
    "predict",
    "predict_figures",
    "predict_layout",
    "predict_memory",
    "predict_step",
    "predicted_memory",
    "read_memory",
    "read_source",
    "refine",
    "scaled_collectives",
    "scaled_compute",
    "server_memory",
    "shape_memory",
    "state_rules",
    "together",
    "write_memory",
]
