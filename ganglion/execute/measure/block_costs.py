"""The cost of each block, for cutting stages evenly: measured, or estimated from its weights.

A measurement runs one microbatch through the model block by block, forward and backward, and keeps
the activations of one block at a time. Gradients, buffers and random state are restored afterwards.
Blocks on the meta device get memory while they are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from ganglion.execute.comm import World
from ganglion.execute.models import LossFn, lent_memory, named_buffers

_REPEATS = 4  # the least of them counts: any disturbance makes a measurement longer
_BACKWARD_SHARE = 2.0  # backward over forward, of a block whose backward cannot be run alone

Sample = tuple[Tensor, Tensor]
Autocast = Callable[[], AbstractContextManager[object]]


def guessed_costs(blocks: Mapping[str, nn.Module]) -> list[float]:
    """Return an estimated cost of each block: the number of its parameters, plus one.

    Embeddings count nothing: they are a lookup.
    """
    return [
        1.0
        + sum(
            p.numel()
            for module in block.modules()
            if not isinstance(module, nn.Embedding)
            for p in module.parameters(recurse=False)
        )
        for block in blocks.values()
    ]


def agreed_costs(world: World, measured: Sequence[float]) -> list[float]:
    """Return the least cost that any rank measured for each block; collective.

    All ranks must cut at the same blocks. They measure at the same time, as they will compute.
    """
    table = world.gather_numbers(list(measured))
    return [float(cost) for cost in table.min(dim=0).values]


def measured_costs(
    blocks: Mapping[str, nn.Module], loss_fn: LossFn, sample: Sample, autocast: Autocast
) -> list[float]:
    """Return the seconds of each block, forward and backward; the last one with the loss."""
    ordered = list(blocks.values())
    with _left_as_it_was(blocks):
        _time_once(ordered, loss_fn, sample, autocast)  # warms up
        rounds = [_time_once(ordered, loss_fn, sample, autocast) for _ in range(_REPEATS)]
    return [min(taken) for taken in zip(*rounds, strict=True)]


@contextmanager
def _left_as_it_was(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    parameters = [p for block in blocks.values() for p in block.parameters()]
    gradients = [p.grad for p in parameters]
    buffers = {name: buffer.clone() for name, buffer in named_buffers(blocks).items()}
    for parameter in parameters:
        parameter.grad = None
    with torch.random.fork_rng():
        yield
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for name, buffer in named_buffers(blocks).items():
        buffer.copy_(buffers[name])


def _time_once(
    blocks: Sequence[nn.Module], loss_fn: LossFn, sample: Sample, autocast: Autocast
) -> list[float]:
    hidden, target = sample
    seconds = []
    for place, block in enumerate(blocks):
        is_last = place == len(blocks) - 1

        def run(value: Tensor, block: nn.Module = block, ends: bool = is_last) -> Tensor:
            with autocast():
                output = block(value)
            result: Tensor = loss_fn(output, target) if ends else output
            return result

        with lent_memory(block, target.device):
            hidden, taken_s = _time_block(run, hidden)
        seconds.append(taken_s)
    return seconds


def _time_block(run: Callable[[Tensor], Tensor], value: Tensor) -> tuple[Tensor, float]:
    """Return the output of a block, and its seconds; without a tensor, backward is estimated."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_floating_point():
            value.requires_grad_()
    start_s = _now_s()
    output = run(value)
    forward_s = _now_s() - start_s
    if not isinstance(output, Tensor):
        return output, forward_s * (1 + _BACKWARD_SHARE)
    if output.requires_grad:
        torch.autograd.backward(output, torch.ones_like(output))
    return output.detach(), _now_s() - start_s


def _now_s() -> float:
    """Return the time when the device has finished its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
