"""The entrance of a stage that offloads activations: the gradient of its input, not the input.

A leaf of the graph would keep its memory from forward to backward. Here the input becomes an inner
tensor, whose memory goes as soon as autograd has saved it elsewhere; its gradient ends in a box.

    box <--- [ entrance ] <--- gradient         hidden ---> [ entrance ] ---> first block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(slots=True)
class Entrance:
    """Where the gradient of an input arrives."""

    grad: Tensor | None = None


def enter(hidden: Tensor) -> tuple[Tensor, Entrance]:
    """Return an input as an inner tensor of a graph, and where its gradient will be."""
    entrance, anchor = Entrance(), torch.empty(0, requires_grad=True)
    inner: Tensor = _Enter.apply(anchor, hidden, entrance)  # type: ignore[no-untyped-call]
    return inner, entrance


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        return hidden.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.entrance.grad = gradient.contiguous()
        return None, None, None
