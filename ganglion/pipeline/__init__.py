"""Pipeline: the message-driven engine and what its stages are made of."""

from ganglion.pipeline.engine import Engine, Worker
from ganglion.pipeline.stage import LossFn, Stage, StageSettings
from ganglion.pipeline.versions import WeightVersions
from ganglion.pipeline.weight_gradients import Deferral, WeightStore, defer_weight_gradients

__all__ = [
    "Deferral",
    "Engine",
    "LossFn",
    "Stage",
    "StageSettings",
    "WeightStore",
    "WeightVersions",
    "Worker",
    "defer_weight_gradients",
]
