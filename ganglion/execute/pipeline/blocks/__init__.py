"""Blocks on one rank: forward and backward of a chain of blocks, a microbatch at a time.

Recomputation, deferred weight gradients, widened weights and random numbers per block live here.
Schedules, messages and updates do not.
"""

from ganglion.execute.pipeline.blocks.chain import Call, Chain, LossFn, plain_call
from ganglion.execute.pipeline.blocks.random_stream import RandomStream
from ganglion.execute.pipeline.blocks.stage import Stage, StageSettings
from ganglion.execute.pipeline.blocks.weight_gradients import (
    Deferral,
    WeightStore,
    defer_weight_gradients,
)
from ganglion.execute.pipeline.blocks.widening import WidenedCall

__all__ = [
    "Call",
    "Chain",
    "Deferral",
    "LossFn",
    "RandomStream",
    "Stage",
    "StageSettings",
    "WeightStore",
    "WidenedCall",
    "defer_weight_gradients",
    "plain_call",
]
