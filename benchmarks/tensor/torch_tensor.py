"""The peers of the tensor benchmark: torch's tensor parallelism and FSDP2, as their users write it.

`dtensor_tp` cuts columns and rows of the layers with `parallelize_module`, the vocabulary of the
embedding and of the head too, and leaves the loss split (`loss_parallel`): Megatron's layout.
`fsdp2` is `fully_shard` as it comes; `fsdp2_keep` gathers weights once a step and reduces
gradients once a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import Optimizer

from ganglion.execute.models import GPT, cross_entropy

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """A model with what its loop calls: before each microbatch, around it, and before updates."""

    model: nn.Module
    optimizer: Optimizer
    clip: Callable[[], object]
    on_microbatch: Callable[[bool], None] = lambda last: None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def steps(self, batch: Batch, microbatch_size: int) -> Iterator[float]:
        """Train on one batch again and again; yield the loss of each step."""
        cut = [part.split(microbatch_size) for part in batch]
        while True:
            self.optimizer.zero_grad()
            losses = [
                self._microbatch(inputs, targets, len(cut[0]), index == len(cut[0]) - 1)
                for index, (inputs, targets) in enumerate(zip(*cut, strict=True))
            ]
            self.clip()
            self.optimizer.step()
            yield float(torch.stack(losses).mean())

    def _microbatch(self, inputs: Tensor, targets: Tensor, number: int, last: bool) -> Tensor:
        self.on_microbatch(last)
        with self.around():
            loss = cross_entropy(self.model(inputs), targets)
            (loss / number).backward()
        return _local(loss.detach())


def plain(model: GPT, make_optimizer: Callable[..., Optimizer], max_grad_norm: float) -> Training:
    """Train a model as it is."""
    clip = partial(_clip, model, max_grad_norm)
    return Training(model, make_optimizer(model.parameters()), clip)


def dtensor_tp(
    model: GPT, make_optimizer: Callable[..., Optimizer], max_grad_norm: float
) -> Training:
    """Split a model as Megatron does."""
    mesh = _mesh()
    vocabulary = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model.embedding, mesh, {"tokens": vocabulary})
    for layer in model.layers:
        attention = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(layer.attention, mesh, attention)
        parallelize_module(layer.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model.head, mesh, {"linear": ColwiseParallel(use_local_output=False)})
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    # Two groups: one update cannot take split and whole parameters together.
    optimizer = make_optimizer([{"params": cut}, {"params": whole}])
    clip = partial(_clip_both, cut, whole, max_grad_norm)
    return Training(model, optimizer, clip, around=loss_parallel)


def fsdp2(
    keeps: bool, model: GPT, make_optimizer: Callable[..., Optimizer], max_grad_norm: float
) -> Training:
    """Store a model in pieces; with `keeps`, gather and reduce once a step."""
    options = {"reshard_after_forward": False} if keeps else {}
    mesh = _mesh()
    halves = itertools.chain.from_iterable(layer.children() for layer in model.layers)
    for half in halves:
        fully_shard(half, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    assert isinstance(model, FSDPModule)

    def on_microbatch(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    training = plain(model, make_optimizer, max_grad_norm)
    if not keeps:
        return training
    return Training(model, training.optimizer, training.clip, on_microbatch)


def _mesh() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def _clip(model: nn.Module, max_grad_norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)


def _clip_both(
    cut: Sequence[nn.Parameter], whole: Sequence[nn.Parameter], max_grad_norm: float
) -> None:
    """Clip by the norm over pieces of all ranks and over what every rank has whole."""
    pieces = [_local(p.grad) for p in cut if p.grad is not None]
    copies = [p.grad for p in whole if p.grad is not None]
    square = nn.utils.get_total_norm(pieces).square()
    dist.all_reduce(square)
    norm = (square + nn.utils.get_total_norm(copies).square()).sqrt()
    torch._foreach_mul_([*pieces, *copies], (max_grad_norm / (norm + 1e-6)).clamp(max=1.0))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
