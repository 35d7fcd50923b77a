"""Decide on the gradients of a batch from their norm over all ranks: a factor, or no update.

norm not finite (fp16)   skipped on every rank: all know the same norm
otherwise                factor = clipping / loss scale, None if there is neither
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.decide.schedules import LossScale
from ganglion.execute.gradients import clip_factor


class GradientDecision(NamedTuple):
    """The factor of the gradients of a batch, or a skip; `norm` is without the loss scale."""

    norm: Tensor
    factor: Tensor | None = None
    is_skipped: bool = False
    loss_scale: float | None = None


class GradientPolicy:
    """Decides on every batch, once each and in order."""

    def __init__(self, max_grad_norm: float, scaling: LossScale | None = None) -> None:
        """Clip to `max_grad_norm`, if it is above 0; `scaling` is that of the losses."""
        self._max_grad_norm = max_grad_norm
        self._scaling = scaling

    @property
    def needs_norm(self) -> bool:
        """Whether no update can be made before the norm of all ranks is known."""
        return self._max_grad_norm > 0 or self._scaling is not None

    def scale_of(self, batch: int) -> float:
        """Return the factor of the loss of a batch."""
        return 1.0 if self._scaling is None else self._scaling.scale_of(batch)

    def decide(self, batch: int, norm: Tensor) -> GradientDecision:
        """Return the decision on a batch whose gradients have this norm."""
        if self._scaling is None:
            return GradientDecision(norm, self._clipping(norm))
        scale, is_fine = self._scaling.scale_of(batch), bool(torch.isfinite(norm))
        self._scaling.record(batch, is_fine)
        norm = norm / scale
        if not is_fine:
            return GradientDecision(norm, is_skipped=True, loss_scale=scale)
        clipping = self._clipping(norm)
        factor = torch.tensor(1.0) if clipping is None else clipping
        return GradientDecision(norm, factor / scale, loss_scale=scale)

    def _clipping(self, norm: Tensor) -> Tensor | None:
        return clip_factor(norm, self._max_grad_norm) if self._max_grad_norm > 0 else None
