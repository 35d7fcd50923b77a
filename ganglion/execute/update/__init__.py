"""Update: from reduced gradients to new weights and the result of a step.

Precision, optimizers, clipping, tiers and weight versions live here. Forward, backward and
schedules do not.
"""

from ganglion.execute.update.batch_end import (
    AveragedWeights,
    AverageWeights,
    BatchEnd,
    StepResult,
)
from ganglion.execute.update.optimizers import (
    LrFactor,
    OptimizerFactory,
    RateSetter,
    constant,
    optimizer_factory,
    warmup_cosine,
)
from ganglion.execute.update.policy import GradientDecision, GradientPolicy
from ganglion.execute.update.precision import WideLoss, as_input, autocast, wide
from ganglion.execute.update.split_muon import SplitMatrices, over_pieces
from ganglion.execute.update.step_numbers import StepNumbers
from ganglion.execute.update.update_factory import UpdateFactory
from ganglion.execute.update.updating import Update
from ganglion.execute.update.versions import ErrorFeedback, WeightVersions

__all__ = [
    "AverageWeights",
    "AveragedWeights",
    "BatchEnd",
    "ErrorFeedback",
    "GradientDecision",
    "GradientPolicy",
    "LrFactor",
    "OptimizerFactory",
    "RateSetter",
    "SplitMatrices",
    "StepNumbers",
    "StepResult",
    "Update",
    "UpdateFactory",
    "WeightVersions",
    "WideLoss",
    "as_input",
    "autocast",
    "constant",
    "optimizer_factory",
    "over_pieces",
    "warmup_cosine",
    "wide",
]
