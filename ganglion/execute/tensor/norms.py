"""Norms over features that are split: statistics of all pieces, so the result is the serial one.

Mean and spread of each piece are gathered and combined as Chan, Golub and LeVeque do, which stays
exact where a difference of two large sums would not. Two numbers a row travel:

    piece 0: mean, sum of squared deviations  \\
    piece 1: mean, sum of squared deviations   --> mean and variance of the whole row
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ganglion.execute.comm import Group


class SplitLayerNorm(nn.Module):
    """nn.LayerNorm over the last dim, of which each rank of `group` has an equal piece."""

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, eps: float, group: Group
    ) -> None:
        """Scale by this rank's pieces of weight and bias."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalize every row, in fp32 at least."""
        normal: Tensor = _LayerNorm.apply(wide(x), self.eps, self._group)  # type: ignore[no-untyped-call]
        if self.weight is not None:
            normal = normal * self.weight
        if self.bias is not None:
            normal = normal + self.bias
        return normal if torch.is_autocast_enabled(x.device.type) else normal.to(x.dtype)


class SplitRMSNorm(nn.Module):
    """RMSNorm over the last dim, of which each rank of `group` has an equal piece."""

    def __init__(self, weight: nn.Parameter | None, eps: float | None, group: Group) -> None:
        """Scale by this rank's piece of the weight; without `eps`, it is that of the dtype."""
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalize every row, in fp32 at least; the scale comes after rounding, as in Llama."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normal: Tensor = _RMSNorm.apply(wide(x), eps, self._group)  # type: ignore[no-untyped-call]
        normal = normal.to(x.dtype)
        return normal if self.weight is None else self.weight * normal


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: Group) -> Tensor:
        mean, variance = _mean_and_variance(x, group)
        scale = torch.rsqrt(variance + eps)
        normal = (x - mean) * scale
        ctx.group = group
        ctx.save_for_backward(normal, scale)
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        normal, scale = ctx.saved_tensors
        means = _row_means((gradient, gradient * normal), ctx.group)
        return (gradient - means[0] - normal * means[1]) * scale, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: Group) -> Tensor:
        (mean_square,) = _row_means((x * x,), group)
        scale = torch.rsqrt(mean_square + eps)
        normal = x * scale
        ctx.group = group
        ctx.save_for_backward(normal, scale)
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        normal, scale = ctx.saved_tensors
        (mean,) = _row_means((gradient * normal,), ctx.group)
        return (gradient - normal * mean) * scale, None, None


def _mean_and_variance(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    mean = x.mean(-1)
    squares = (x - mean[..., None]).square().sum(-1)
    mine = torch.stack((mean, squares))
    all_ = mine.new_empty((group.size * 2, *mean.shape))
    group.all_gather(all_, mine).wait()
    means, sums = all_.view(group.size, 2, *mean.shape).unbind(1)
    whole = means.mean(0)
    spread = (means - whole).square().sum(0) * x.shape[-1]
    variance = (sums.sum(0) + spread) / (x.shape[-1] * group.size)
    return whole[..., None], variance[..., None]


def _row_means(rows: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
    """Return the mean of each whole row, of which this rank has a piece."""
    sums = torch.stack([row.sum(-1) for row in rows])
    group.all_reduce(sums).wait()
    sums /= rows[0].shape[-1] * group.size
    return tuple(each[..., None] for each in sums)


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
