"""Split layers: products (linear layers and convolutions), embeddings and dropout.

The rows of an embedding table are split over one axis, its features over another. A rank looks up
the ids among its rows and contributes zeros for the others; the sum over the axis of the rows is
the lookup in the whole table. Weights and tables are stored in pieces along z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.errors import DataError, LayoutError
from ganglion.execute.comm import Group
from ganglion.execute.tensor.activations import cut, gather
from ganglion.execute.tensor.multiply import Layer, multiply
from ganglion.execute.tensor.weights import StoredWeight, phase_now


class SplitProduct(nn.Module):
    """A linear layer or a convolution: input features split over one axis, outputs over another.

    With `takes_whole` it cuts whole activations itself, with `gives_whole` it gathers its output:
    so it fits between layers that are not split.
    """

    def __init__(
        self,
        name: str,
        layer: Layer,
        bias: nn.Parameter | None,
        *,
        feature_dim: int,
        in_features: int,
        takes_whole: bool = False,
        gives_whole: bool = False,
    ) -> None:
        """Multiply with the weight of `layer`; `feature_dim` is -1, or 1 for images."""
        super().__init__()
        self.weight = layer.weight.parameter
        self.bias = bias
        self.in_features = in_features  # those of all ranks with takes_whole, else this rank's
        self._name = name
        self._layer = layer
        self._feature_dim = feature_dim
        self._cut_group: Group | None = layer.in_group if takes_whole else None
        self._gather_group: Group | None = layer.out_group if gives_whole else None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features of the output, or all of them."""
        if x.shape[self._feature_dim] != self.in_features:
            raise LayoutError(
                f"{self._name} takes {self.in_features} features in dim {self._feature_dim}, but "
                f"got activations of shape {tuple(x.shape)}: its cut must fit the layers around "
                f"it, or take whole activations as the layers without a cut do"
            )
        x = cut(x, self._cut_group, self._feature_dim)
        if self._feature_dim == 1:
            output, bias_shape = multiply(x, self._layer), (-1, *[1] * (x.dim() - 2))
        else:
            output = multiply(x.flatten(0, -2), self._layer).view(*x.shape[:-1], -1)
            bias_shape = (-1,)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype).view(bias_shape)
        return gather(output, self._gather_group, self._feature_dim)


@dataclass(frozen=True, slots=True)
class _Table:
    weight: StoredWeight
    group: Group | None  # splits the rows
    num_rows: int
    first: int


class SplitEmbedding(nn.Module):
    """nn.Embedding of a split table."""

    def __init__(self, stored: StoredWeight, group: Group | None, rows: range) -> None:
        """Hold `rows` of the whole table; `group` splits them."""
        super().__init__()
        self.weight = stored.parameter
        self.num_embeddings = len(rows) * (1 if group is None else group.size)
        self._table = _Table(stored, group, len(rows), rows.start)

    def forward(self, ids: Tensor) -> Tensor:
        """Return this rank's features of the vectors of ids of any shape."""
        check_numbers(ids, self.num_embeddings, "id")
        vectors: Tensor = _LookUp.apply(self.weight, ids, self._table)  # type: ignore[no-untyped-call]
        return vectors


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ids: Tensor, table: _Table) -> Tensor:
        ctx.table = table
        block = table.weight.block(phase_now())
        if table.group is None:
            ctx.save_for_backward(ids)
            return F.embedding(ids, block)
        local = ids - table.first
        is_here = (local >= 0) & (local < table.num_rows)
        local = local.where(is_here, 0)
        ctx.save_for_backward(local, is_here)
        vectors = F.embedding(local, block) * is_here[..., None]
        table.group.all_reduce(vectors).wait()
        return vectors

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        table: _Table = ctx.table
        ids, *here = ctx.saved_tensors
        if here:
            gradient = gradient * here[0][..., None]
        block = gradient.new_zeros(table.num_rows, gradient.shape[-1])
        block.index_add_(0, ids.flatten(), gradient.flatten(0, -2))
        return table.weight.gradient(block), None, None


class SplitDropout(nn.Module):
    """nn.Dropout on activations of which each rank of `group` has an equal piece along `dim`.

    The mask is drawn for whole features and cut, so it is that of the serial model in any layout.
    """

    def __init__(self, p: float, group: Group, dim: int) -> None:
        """Drop with probability `p`."""
        super().__init__()
        self.p = p
        self._group = group
        self._dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mask in training; return `x` in evaluation."""
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        shape[self._dim] *= self._group.size
        # torch's own dropout of ones draws the same random numbers as the serial layer.
        mask = torch.dropout(x.new_ones(shape), self.p, train=True)
        return x * mask.chunk(self._group.size, self._dim)[self._group.index]


def check_numbers(numbers: Tensor, total: int, what: str) -> None:
    """Refuse row numbers outside 0 .. total - 1: no rank holds them, and they would count 0."""
    good = (numbers >= 0) & (numbers < total)
    if numbers.device.type != "cpu":
        torch._assert_async(good.all())  # reading the answer would stop the device
    elif not bool(good.all()):
        wrong = int(numbers[~good].flatten()[0])
        raise DataError(
            f"{what} {wrong} is outside 0 .. {total - 1}: check the data, or the size that the "
            f"model was built with"
        )
