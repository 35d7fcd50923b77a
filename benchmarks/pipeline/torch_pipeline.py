"""The peer of the pipeline benchmark: steps under the schedules of torch.distributed.pipelining.

Stages are torch's own `PipelineStage`, split by hand; gradients are clipped by the norm over all
stages, as torchtitan does it, for torch's schedules leave that to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.optim import Optimizer

from ganglion.decide.schedules.pipeline import StageMap

CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TorchWay:
    """A schedule of torch, and how many stages it wants on a rank."""

    schedule: Callable[..., Any]
    num_chunks: int = 1
    folded: bool = False

    def stage_map(self, num_ranks: int) -> StageMap:
        return StageMap(num_ranks, self.num_chunks, self.folded)


GPIPE = TorchWay(ScheduleGPipe)
ONE_F_ONE_B = TorchWay(Schedule1F1B)
INTERLEAVED = TorchWay(ScheduleInterleaved1F1B, num_chunks=2)
ZBV = TorchWay(ScheduleZBVZeroBubble, num_chunks=2, folded=True)


def even_split(
    embedding: nn.Module, layers: Sequence[nn.Module], head: nn.Module, num_stages: int
) -> list[nn.Sequential]:
    """Cut a model as people do: as many layers on each stage, the ends where they belong."""
    each, rest = divmod(len(layers), num_stages)
    if rest:
        raise ValueError(f"{len(layers)} layers cannot be dealt evenly to {num_stages} stages")
    parts = [list(layers[each * stage : each * (stage + 1)]) for stage in range(num_stages)]
    parts[0].insert(0, embedding)
    parts[-1].append(head)
    return [nn.Sequential(*part) for part in parts]


def torch_steps(
    way: TorchWay,
    stages: Sequence[PipelineStage],
    num_microbatches: int,
    loss_fn: LossFn,
    make_optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
    batch: Batch,
    max_grad_norm: float = 0.0,
) -> Iterator[None]:
    """Train on one batch again and again; yield after every step."""
    held: Any = stages[0] if way.num_chunks == 1 else list(stages)
    schedule = way.schedule(held, n_microbatches=num_microbatches, loss_fn=loss_fn)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = make_optimizer(iter(parameters))
    inputs = (batch[0],) if any(stage.is_first for stage in stages) else ()
    has_loss = any(stage.is_last for stage in stages)
    while True:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        wanted = {"target": batch[1], "losses": losses} if has_loss else {}
        schedule.step(*inputs, return_outputs=False, **wanted)
        if max_grad_norm > 0:
            clip_over_stages(parameters, max_grad_norm)
        optimizer.step()
        yield


def clip_over_stages(parameters: Sequence[nn.Parameter], max_grad_norm: float) -> None:
    """Clip by the norm of the gradients of all ranks."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    square = norm.square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, square.sqrt())
