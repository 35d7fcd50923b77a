"""The 3-D parallel product: AxoNN-4D's algorithm as one autograd node.

    forward    gather W over z;  O = I W;  all-reduce O over the axis of I's features
    backward   gather W over z;  dI = dO W^T, all-reduce over the axis of O's features
               dW = I^T dO, reduce-scatter over z

An input without gradient (the data, in the first layer) needs no first line of backward. With OAR
the all-reduce of dI runs while dW is computed. Without such an all-reduce dW comes first, so that
its reduce-scatter runs while dI is computed. With halves, rows are cut in two wherever an
all-reduce follows:

    matmul       | half 0 | half 1 |
    all-reduce            ~~ half 0 ~~ ~~ half 1 ~~
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ganglion.decide.schedules.buckets import BACKWARD
from ganglion.execute.comm import Group, Handle
from ganglion.execute.tensor.products import Product
from ganglion.execute.tensor.weights import StoredWeight, phase_now


@dataclass(frozen=True, slots=True)
class Layer:
    """The product, weight and groups of a layer.

    Without `overlap` every all-reduce is waited for at once, with the same arithmetic.
    """

    product: Product
    weight: StoredWeight
    in_group: Group | None  # splits the features of the input
    out_group: Group | None
    overlap: bool
    halves: bool = False


def multiply(x: Tensor, layer: Layer) -> Tensor:
    """Return the product of activations, whose rows are dim 0, and a layer's weight."""
    output: Tensor = _Multiply.apply(x, layer.weight.parameter, layer)  # type: ignore[no-untyped-call]
    return output


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        ctx.dtype = _compute_dtype(x)
        ctx.x_dtype = x.dtype
        x = x.to(ctx.dtype)
        ctx.save_for_backward(x)
        with torch.autocast(x.device.type, enabled=False):
            block = layer.weight.block(phase_now()).to(ctx.dtype)
            return _Summed(layer, layer.in_group, lambda part: layer.product.output(part, block))(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer: Layer = ctx.layer
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            block = layer.weight.block(BACKWARD).to(ctx.dtype) if needs_x else None
            backward = _Backward(layer, x, gradient.to(ctx.dtype), block)
            if layer.out_group is None or not needs_x:
                of_weight = backward.of_weight() if needs_weight else None
                of_x = backward.of_x() if needs_x else None
            else:
                of_x, of_weight = backward.of_both(needs_weight)
        return None if of_x is None else of_x.to(ctx.x_dtype), of_weight, None


@dataclass(frozen=True, slots=True)
class _Backward:
    """One backward: its two products, and how they overlap."""

    layer: Layer
    x: Tensor
    gradient: Tensor
    block: Tensor | None  # of the weight; only the gradient of the input needs it

    def of_x(self) -> Tensor:
        return self._product_of_x(self.gradient, self.x)

    def of_weight(self) -> Tensor | None:
        made = self.layer.product.weight_gradient(self.gradient, self.x, self.layer.weight.shape)
        return self.layer.weight.gradient(made)

    def of_both(self, needs_weight: bool) -> tuple[Tensor, Tensor | None]:
        summed = _Summed(self.layer, self.layer.out_group, self._product_of_x)
        summed.start(self.gradient, self.x)
        of_weight = self.of_weight() if needs_weight else None
        return summed.finish(), of_weight

    def _product_of_x(self, gradient: Tensor, x: Tensor) -> Tensor:
        assert self.block is not None
        return self.layer.product.input_gradient(gradient, self.block, x)


class _Summed:
    """A function of rows summed over a group, in halves if the layer is set so."""

    def __init__(self, layer: Layer, group: Group | None, compute: Callable[..., Tensor]) -> None:
        self._compute = compute
        self._group = group
        self._overlap = layer.overlap
        self._num_parts = 2 if layer.halves and group is not None else 1
        self._parts: list[Tensor] = []
        self._handles: list[Handle] = []

    def __call__(self, *rows: Tensor) -> Tensor:
        self.start(*rows)
        return self.finish()

    def start(self, *rows: Tensor) -> None:
        """Compute part after part; the sum of one runs while the next is computed."""
        # An odd row belongs to the first half; a single row has no second one.
        for part in zip(*(each.chunk(self._num_parts) for each in rows), strict=True):
            self._parts.append(self._compute(*part).contiguous())
            if self._group is not None:
                self._handles.append(self._group.all_reduce(self._parts[-1]))
            if not self._overlap:
                _wait(self._handles)

    def finish(self) -> Tensor:
        """Return the sum of all rows."""
        _wait(self._handles)
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)


def _wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch's autocast would compute; doubles stay doubles."""
    device = x.device.type
    is_cast = x.is_floating_point() and x.dtype != torch.float64
    if is_cast and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
