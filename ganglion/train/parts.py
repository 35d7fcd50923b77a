"""The parts of a run, as `parallelize` joins them and saving needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.comm import World
from ganglion.plan import Plan
from ganglion.trace import Recorder
from ganglion.train.executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything a run holds; parameters and buffers go by their serial names."""

    plan: Plan
    world: World
    device: torch.device
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    executor: Executor
    optimizers: Sequence[Optimizer]
    recorder: Recorder
    seed: int

    def model_tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers under their serial names, without their history."""
        named = {**self.parameters, **self.buffers}
        return {name: tensor.detach() for name, tensor in named.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of a model, and what runs it."""

    executor: Executor
    parameters: dict[str, nn.Parameter]
    optimizers: list[Optimizer]
    block_names: tuple[str, ...]
