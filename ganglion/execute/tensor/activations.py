"""Cut whole activations into pieces and gather them, along one dim and one axis.

    cut      forward: keep this rank's piece     backward: gather the gradients of all pieces
    gather   forward: gather the pieces          backward: keep this rank's piece

Both assume that whole tensors are the same on all ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ganglion.errors import LayoutError
from ganglion.execute.comm import Group


def cut(x: Tensor, group: Group | None, dim: int = -1) -> Tensor:
    """Return this rank's piece of a whole tensor."""
    if group is None:
        return x
    if x.shape[dim] % group.size:
        raise LayoutError(
            f"activations of shape {tuple(x.shape)} have {x.shape[dim]} entries in dim {dim}, "
            f"which {group.size} ranks do not divide: choose a multiple of {group.size}"
        )
    piece: Tensor = _Cut.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return piece


def gather(piece: Tensor, group: Group | None, dim: int = -1) -> Tensor:
    """Return the whole tensor, of which every rank has a piece."""
    if group is None:
        return piece
    whole: Tensor = _Gather.apply(piece, group, dim)  # type: ignore[no-untyped-call]
    return whole


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.split = (group, dim)
        return _piece(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _whole(gradient, *ctx.split), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: Group, dim: int) -> Tensor:
        ctx.split = (group, dim)
        return _whole(piece, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _piece(gradient, *ctx.split), None, None


def _piece(x: Tensor, group: Group, dim: int) -> Tensor:
    # A copy: a view would keep the whole tensor alive as long as the piece.
    return x.chunk(group.size, dim)[group.index].contiguous()


def _whole(piece: Tensor, group: Group, dim: int) -> Tensor:
    first = piece.movedim(dim, 0).contiguous()
    whole = first.new_empty((first.shape[0] * group.size, *first.shape[1:]))
    group.all_gather(whole, first).wait()
    return whole.movedim(0, dim).contiguous()
