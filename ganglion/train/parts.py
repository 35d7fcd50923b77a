"""The parts of a run, as `parallelize` joins them and saving needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.comm import World
from ganglion.models import InitialWeights, LossFn
from ganglion.offload.activations import ActivationOffload
from ganglion.plan import Plan
from ganglion.schedules import Registry
from ganglion.tensor import TensorReport
from ganglion.topology import Placement
from ganglion.trace import Recorder
from ganglion.train.averaged import Averaged, AveragingSettings
from ganglion.train.block_costs import Sample
from ganglion.train.executor import Executor
from ganglion.train.optimizers import OptimizerFactory
from ganglion.train.random_stream import RandomStream


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything a run holds; parameters and buffers go by their serial names.

    `feedback` is what error feedback remembers, also by name; None without it. `placements` tell
    which piece of each parameter this rank holds, empty if it holds them whole; `tensor_report`
    tells what was split and what not, None without tensor axes. What is `averaged` over workers is
    empty without elastic averaging.
    """

    plan: Plan
    world: World
    device: torch.device
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    executor: Executor
    optimizers: Sequence[Optimizer]
    feedback: Mapping[str, Tensor] | None
    recorder: Recorder
    seed: int
    placements: Mapping[str, Placement]
    tensor_report: TensorReport | None
    averaged: Sequence[Averaged]

    def model_tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers under their serial names, without their history."""
        named = {**self.parameters, **self.buffers}
        return {name: tensor.detach() for name, tensor in named.items()}

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return the same as all workers share it: averaged tensors are those of the centre."""
        found = self.model_tensors()
        for averaged in self.averaged:
            found.update(averaged.center())
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What `parallelize` was asked for; `costs` tells what each block costs, to cut stages by."""

    blocks: Mapping[str, nn.Module]
    loss_fn: LossFn
    optimizer_factory: OptimizerFactory
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
    sample: Sample | None
    initial: InitialWeights | None  # of blocks on the meta device
    averaging: AveragingSettings
    activations: ActivationOffload | None = None  # where they wait for their backward
    costs: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of a model, and what runs it."""

    executor: Executor
    parameters: dict[str, nn.Parameter]
    optimizers: list[Optimizer]
    feedback: dict[str, Tensor] | None = None
    averaged: list[Averaged]
    block_names: tuple[str, ...]
    plan: Plan  # with the cut that was made
