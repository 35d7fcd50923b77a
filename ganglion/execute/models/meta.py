"""Models on the meta device: shapes without memory, until a rank gives memory to what it holds.

Blocks are split and assigned to stages without memory. Then each rank allocates and fills its own
part: it never holds a whole matrix or another stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from ganglion.decide.topology import Placement
from ganglion.errors import ConfigError
from ganglion.execute.comm import World
from ganglion.execute.models.initial import InitialWeights


def check_memory(blocks: Mapping[str, nn.Module], initial: InitialWeights | None) -> None:
    """Refuse blocks without memory or `initial` weights, and blocks with both."""
    for block_name, block in blocks.items():
        for name, tensor in chain(block.named_parameters(), block.named_buffers()):
            if tensor.is_meta and initial is None:
                raise ConfigError(
                    f"{block_name}.{name} is on the meta device and has no values: give "
                    f"parallelize the model's `initial` weights, or build it with memory"
                )
            if initial is not None and not tensor.is_meta:
                raise ConfigError(
                    f"{block_name}.{name} has values already, but `initial` weights are given: "
                    f'build the model inside torch.device("meta"), or leave out `initial`'
                )


def make_real(
    tensors: Mapping[str, Tensor],
    initial: InitialWeights,
    placements: Mapping[str, Placement],
    world: World,
    device: torch.device,
) -> None:
    """Give tensors memory on the device and this rank's piece of their initial values.

    `tensors` go by serial names and stay the same objects, so that all layers and tied blocks that
    refer to one see it filled. A tensor without a placement is whole.
    """
    for name, tensor in tensors.items():
        placement = placements.get(name) or Placement(shape=tuple(tensor.shape))
        piece = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        boxes = placement.boxes(world.mesh, world.coordinates)
        initial.fill(piece, name, placement.shape, boxes)
        _replace_value(tensor, piece)


@contextmanager
def lent_memory(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Give a block on the meta device memory and ordinary values inside, for timing."""
    tensors = {id(t): t for t in chain(block.parameters(), block.buffers()) if t.is_meta}
    lent = {
        key: _replace_value(tensor, _ordinary(tensor, device)) for key, tensor in tensors.items()
    }
    try:
        yield
    finally:
        for key, meta in lent.items():
            _swap(tensors[key], meta)


def _replace_value(tensor: Tensor, value: Tensor) -> Tensor:
    """Give a tensor object this value; return a tensor with its old value."""
    other = value
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(value, requires_grad=tensor.requires_grad)
    _swap(tensor, other)
    return other


def _swap(one: Tensor, other: Tensor) -> None:
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def _ordinary(tensor: Tensor, device: torch.device) -> Tensor:
    """Return values that do not overflow and do not become slow denormals."""
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return value.fill_(1)
    bound = 1.0 / math.sqrt(max(1, math.prod(tensor.shape[1:])))
    return value.uniform_(-bound, bound)
