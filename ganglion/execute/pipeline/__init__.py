"""Pipeline: the message-driven engine and what its stages are made of."""

from ganglion.execute.pipeline.agreement import Agreement
from ganglion.execute.pipeline.chain import Call, Chain, LossFn, plain_call
from ganglion.execute.pipeline.engine import Engine
from ganglion.execute.pipeline.stage import Stage, StageSettings
from ganglion.execute.pipeline.stage_actions import StageActions
from ganglion.execute.pipeline.weight_gradients import Deferral, WeightStore, defer_weight_gradients
from ganglion.execute.pipeline.widening import WidenedCall

__all__ = [
    "Agreement",
    "Call",
    "Chain",
    "Deferral",
    "Engine",
    "LossFn",
    "Stage",
    "StageActions",
    "StageSettings",
    "WeightStore",
    "WidenedCall",
    "defer_weight_gradients",
    "plain_call",
]
