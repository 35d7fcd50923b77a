"""Dropout on split features: the mask is drawn for whole features and cut.

So it is the mask of the serial model, whatever the layout; drawing costs what it costs there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ganglion.execute.comm import Group


class SplitDropout(nn.Module):
    """nn.Dropout on activations of which each rank of `group` has an equal piece along `dim`."""

    def __init__(self, p: float, group: Group, dim: int) -> None:
        """Drop with probability `p`."""
        super().__init__()
        self.p = p
        self._group = group
        self._dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training, do nothing in evaluation."""
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        shape[self._dim] *= self._group.size
        # torch's own dropout of ones: the same random numbers as the serial layer draws.
        mask = torch.dropout(x.new_ones(shape), self.p, train=True)
        return x * mask.chunk(self._group.size, self._dim)[self._group.index]
