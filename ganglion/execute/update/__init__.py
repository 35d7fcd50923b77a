"""From reduced gradients to new weights: precision, optimizers, clipping, tiers, versions."""

from ganglion.execute.update.batch_end import (
    AveragedWeights,
    AverageWeights,
    BatchEnd,
    StepResult,
)
from ganglion.execute.update.feedback import ErrorFeedback
from ganglion.execute.update.learning_rate import LrFactor, RateSetter, constant, warmup_cosine
from ganglion.execute.update.offloaded import OffloadSettings
from ganglion.execute.update.optimizers import OptimizerFactory, optimizer_factory
from ganglion.execute.update.policy import GradientDecision, GradientPolicy
from ganglion.execute.update.precision import WideLoss, as_input, wide
from ganglion.execute.update.split_muon import SplitMatrices, over_pieces
from ganglion.execute.update.step_numbers import StepNumbers
from ganglion.execute.update.update_factory import UpdateFactory
from ganglion.execute.update.updating import Update
from ganglion.execute.update.versions import WeightVersions

__all__ = [
    "AverageWeights",
    "AveragedWeights",
    "BatchEnd",
    "ErrorFeedback",
    "GradientDecision",
    "GradientPolicy",
    "LrFactor",
    "OffloadSettings",
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
    "constant",
    "optimizer_factory",
    "over_pieces",
    "warmup_cosine",
    "wide",
]
