"""Pipeline: the message-driven engine and what its stages are made of."""

from ganglion.pipeline.agreement import Agreement
from ganglion.pipeline.chain import Call, Chain, LossFn, plain_call
from ganglion.pipeline.engine import Engine
from ganglion.pipeline.feedback import ErrorFeedback
from ganglion.pipeline.stage import Stage, StageSettings
from ganglion.pipeline.versions import WeightVersions
from ganglion.pipeline.weight_gradients import Deferral, WeightStore, defer_weight_gradients
from ganglion.pipeline.widening import WidenedCall
from ganglion.pipeline.worker import Worker

__all__ = [
    "Agreement",
    "Call",
    "Chain",
    "Deferral",
    "Engine",
    "ErrorFeedback",
    "LossFn",
    "Stage",
    "StageSettings",
    "WeightStore",
    "WeightVersions",
    "WidenedCall",
    "Worker",
    "defer_weight_gradients",
    "plain_call",
]
