"""The context that the executor of a rank is built from, and the local model that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import Registry
from ganglion.execute.comm import Group, World
from ganglion.execute.models import InitialWeights, LossFn
from ganglion.execute.offload import ActivationOffload
from ganglion.execute.pipeline.blocks import Call, RandomStream
from ganglion.execute.pipeline.executor import Executor
from ganglion.execute.update import (
    AverageWeights,
    GradientPolicy,
    Update,
    UpdateFactory,
)
from ganglion.trace import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What the parts of a run are built from.

    `costs` holds the cost of each block, to cut stages by. The `policy` decides on the gradients of
    each batch; `call` runs a block.
    """

    blocks: Mapping[str, nn.Module]
    loss_fn: LossFn
    updates: UpdateFactory
    plan: Plan
    schedules: Registry
    world: World
    device: torch.device
    recorder: Recorder
    stream: RandomStream
    autocast: Callable[[], AbstractContextManager[object]]
    bucket_bytes: int
    max_grad_norm: float
    error_feedback: bool
    timeout_s: float
    initial: InitialWeights | None  # of blocks on the meta device
    average: AverageWeights
    policy: GradientPolicy
    call: Call
    activations: ActivationOffload | None = None  # where they wait for their backward
    costs: Sequence[float] = ()
    among: Group | None = None  # the ranks that agree on each step; None for all


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """The part of a model that this rank holds, and the executor that runs it."""

    executor: Executor
    parameters: dict[str, nn.Parameter]
    updates: list[Update]
    feedback: dict[str, Tensor] | None = None
    block_names: tuple[str, ...]
    plan: Plan  # with the cut that was made
