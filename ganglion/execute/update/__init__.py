"""From reduced gradients to new weights: precision, optimizers, clipping, tiers, versions."""

from ganglion.execute.update.feedback import ErrorFeedback
from ganglion.execute.update.learning_rate import LrFactor, RateSetter, constant, warmup_cosine
from ganglion.execute.update.masters import MasterUpdate
from ganglion.execute.update.offloaded import OffloadedUpdate, OffloadSettings, StateOnTier
from ganglion.execute.update.offloaded_masters import OffloadedMasterUpdate, masters_on_tier
from ganglion.execute.update.optimizers import OptimizerFactory, optimizer_factory
from ganglion.execute.update.precision import WideLoss, as_input, take_masters, wide
from ganglion.execute.update.split_muon import SplitMatrices, over_pieces
from ganglion.execute.update.updating import PlainUpdate, Update
from ganglion.execute.update.verdict import Judge, Verdict
from ganglion.execute.update.versions import WeightVersions

__all__ = [
    "ErrorFeedback",
    "Judge",
    "LrFactor",
    "MasterUpdate",
    "OffloadSettings",
    "OffloadedMasterUpdate",
    "OffloadedUpdate",
    "OptimizerFactory",
    "PlainUpdate",
    "RateSetter",
    "SplitMatrices",
    "StateOnTier",
    "Update",
    "Verdict",
    "WeightVersions",
    "WideLoss",
    "as_input",
    "constant",
    "masters_on_tier",
    "optimizer_factory",
    "over_pieces",
    "take_masters",
    "warmup_cosine",
    "wide",
]
