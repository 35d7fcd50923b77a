"""Norms over split features: statistics are those of all pieces, so results are the serial ones.

Mean and spread of each piece are gathered and combined as Chan, Golub and LeVeque do, which stays
exact where a difference of two large sums would not. Two numbers for each row are exchanged:

    piece 0: mean, sum of squared deviations  \\
    piece 1: mean, sum of squared deviations   --> mean and variance of the whole row

Batch norm treats every channel by itself, so a rank keeps its channels and exchanges nothing. A
group of channels of a group norm may lie on several ranks; then the mean and spread of every
channel are gathered, and each rank combines those of its groups:

    channels   | 0  1  2 | 3  4  5 |      pieces
    groups     | 0  0  1   1  2  2 |      group 1 lies on both ranks
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
        """Scale by this rank's piece of the weight; `eps` defaults to that of the dtype."""
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


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SplitGroupNorm(nn.Module):
    """nn.GroupNorm on images, of whose channels each rank of `group` has an equal piece."""

    def __init__(
        self,
        num_groups: int,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        eps: float,
        group: Group,
    ) -> None:
        """Normalize within `num_groups` groups of all channels; scale by the pieces."""
        super().__init__()
        self.num_groups = num_groups
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (samples, channels, places...), in fp32 at least."""
        images = wide(x).flatten(2) if x.dim() > 2 else wide(x)[..., None]
        normal: Tensor = _GroupNorm.apply(images, self)  # type: ignore[no-untyped-call]
        if self.weight is not None:
            normal = normal * self.weight[:, None]
        if self.bias is not None:
            normal = normal + self.bias[:, None]
        normal = normal.view(x.shape)
        return normal if torch.is_autocast_enabled(x.device.type) else normal.to(x.dtype)

    def gathered(self, mine: Tensor) -> Tensor:
        """Return numbers of all channels by group: (k, samples, mine) to (k, samples, groups, .)"""
        size, (kinds, samples, channels) = self._group.size, mine.shape
        all_ = mine.new_empty((size * kinds, samples, channels))
        self._group.all_gather(all_, mine.contiguous()).wait()
        by_rank = all_.view(size, kinds, samples, channels)
        return by_rank.permute(1, 2, 0, 3).reshape(kinds, samples, self.num_groups, -1)

    def own(self, of_groups: Tensor, channels: int) -> Tensor:
        """Return the value of each of this rank's channels: (samples, groups) to (., ., 1)."""
        each = channels * self._group.size // self.num_groups
        first = self._group.index * channels
        return of_groups.repeat_interleave(each, 1).narrow(1, first, channels)[..., None]


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: SplitGroupNorm) -> Tensor:
        mean, variance = _group_mean_and_variance(x, norm)
        scale = norm.own(torch.rsqrt(variance + norm.eps), x.shape[1])
        normal = (x - norm.own(mean, x.shape[1])) * scale
        ctx.norm = norm
        ctx.save_for_backward(normal, scale)
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        norm: SplitGroupNorm = ctx.norm
        normal, scale = ctx.saved_tensors
        sums = norm.gathered(torch.stack((gradient.mean(2), (gradient * normal).mean(2))))
        of_one, of_normal = (norm.own(each, normal.shape[1]) for each in sums.mean(3))
        return (gradient - of_one - normal * of_normal) * scale, None


def _group_mean_and_variance(x: Tensor, norm: SplitGroupNorm) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each group, (samples, groups), from those of its channels."""
    mean = x.mean(2)
    squares = (x - mean[..., None]).square().mean(2)
    means, spreads = norm.gathered(torch.stack((mean, squares)))
    whole = means.mean(2)
    return whole, (spreads + (means - whole[..., None]).square()).mean(2)
