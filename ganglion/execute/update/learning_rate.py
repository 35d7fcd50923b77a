"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

LrFactor = Callable[[int], float]


def constant(step: int) -> float:
    """Return 1 for every step: the optimizer's own rate."""
    return 1.0


def warmup_cosine(
    warmup_steps: int, steps: int, min_fraction: float, *, decay: bool = True
) -> LrFactor:
    """Return the share of the peak rate for update number `step`, counted from 0.

    It rises linearly over the warm-up, then falls along a half cosine to `min_fraction`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if not decay:
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return min_fraction + (1 - min_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


class RateSetter:
    """Sets the learning rate of an update: the optimizers' own rates times a factor."""

    def __init__(self, factor: LrFactor) -> None:
        """Use `factor(step)`; the optimizers come later."""
        self._factor = factor
        self._groups: list[dict[str, Any]] = []

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Remember the rates of some optimizers as their base rates."""
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in self._groups:
            group.setdefault("initial_lr", group["lr"])  # torch's own name for the base rate

    def set(self, step: int) -> float:
        """Set the rate of update `step` and return it, that of the first group."""
        factor = self._factor(step)
        for group in self._groups:
            group["lr"] = group["initial_lr"] * factor
        return float(self._groups[0]["lr"]) if self._groups else 0.0
