"""Norms of images whose channels are split: batch norm needs no exchange, group norm may.

Batch norm treats every channel for itself, so a rank keeps its channels' part of everything. A
group of channels may lie on several ranks; then the mean and spread of every channel, two numbers
for all its places, travel, and each rank combines those of its groups:

    channels   | 0  1  2 | 3  4  5 |      pieces
    groups     | 0  0  1   1  2  2 |      group 1 is half here, half there
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ganglion.execute.comm import Group
from ganglion.execute.tensor.norms import wide

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def whole_groups(num_groups: int, pieces: int) -> bool:
    """Say whether every piece consists of whole groups: then nothing needs to travel."""
    return num_groups % pieces == 0


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
        """Return what belongs to each of this rank's channels: (samples, groups) to (., ., 1)."""
        each = channels * self._group.size // self.num_groups
        first = self._group.index * channels
        return of_groups.repeat_interleave(each, 1).narrow(1, first, channels)[..., None]


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: SplitGroupNorm) -> Tensor:
        mean, variance = _mean_and_variance(x, norm)
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


def _mean_and_variance(x: Tensor, norm: SplitGroupNorm) -> tuple[Tensor, Tensor]:
    """Combine the statistics of channels to those of groups, (samples, groups)."""
    mean = x.mean(2)
    squares = (x - mean[..., None]).square().mean(2)
    means, spreads = norm.gathered(torch.stack((mean, squares)))
    whole = means.mean(2)
    return whole, (spreads + (means - whole[..., None]).square()).mean(2)
