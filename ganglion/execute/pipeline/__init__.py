"""Pipeline: the stages of a rank, the engine that drives their schedule, and their executor.

It also holds what plans without a pipeline share with it: chains of blocks, the executor contract,
microbatches and the split over tensor axes. Averaging and run files do not enter.
"""

from ganglion.execute.pipeline.blocks import (
    Call,
    Chain,
    LossFn,
    RandomStream,
    Stage,
    StageSettings,
    WeightStore,
    WidenedCall,
    defer_weight_gradients,
    plain_call,
)
from ganglion.execute.pipeline.build import build_pipeline
from ganglion.execute.pipeline.context import BuildContext, LocalModel
from ganglion.execute.pipeline.engine import Agreement, Engine, StageActions
from ganglion.execute.pipeline.executor import Batch, Executor, Share, cut_batch
from ganglion.execute.pipeline.pipeline_executor import PipelineExecutor
from ganglion.execute.pipeline.tensor_split import (
    Splitting,
    choose_kept,
    make_blocks_real,
    share_pieces,
    split_blocks,
)

__all__ = [
    "Agreement",
    "Batch",
    "BuildContext",
    "Call",
    "Chain",
    "Engine",
    "Executor",
    "LocalModel",
    "LossFn",
    "PipelineExecutor",
    "RandomStream",
    "Share",
    "Splitting",
    "Stage",
    "StageActions",
    "StageSettings",
    "WeightStore",
    "WidenedCall",
    "build_pipeline",
    "choose_kept",
    "cut_batch",
    "defer_weight_gradients",
    "make_blocks_real",
    "plain_call",
    "share_pieces",
    "split_blocks",
]
