"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable

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
