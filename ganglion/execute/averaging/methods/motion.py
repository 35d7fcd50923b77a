"""How far things move in an exchange: the centre by it, the worker by the step beside it.

    the centre      |c' - c| of the exchanges this worker took part in, by one pass over both
    the worker      |what the optimizer did| in the steps that had an exchange, to be held
                    against the force: estimated from some elements, for no copy of all is kept

The numbers stay on the device until somebody asks for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ganglion.execute.averaging.methods.method import ExchangeMetrics
from ganglion.execute.averaging.methods.packed import Packed

_BLOCK = 1 << 16  # elements: differences of so many stay in the cache of a core
_DEVICE_BLOCK = 1 << 24  # elsewhere, few launches count more


class Motion:
    """What moved in the last exchange of one worker, and when that was."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Have seen the centre now, at rest."""
        self._clock = clock
        self._seen_s = clock()
        self._age_s = 0.0
        self._moved: Tensor | float = 0.0
        self._before: Tensor | None = None
        self._step: Tensor | None = None
        self._scale = 1.0

    def note(self, moved: Tensor | float) -> None:
        """Take note of an exchange that moved the centre so far."""
        now_s = self._clock()
        self._age_s, self._seen_s = now_s - self._seen_s, now_s
        self._moved = moved

    def begin_step(self, packed: Packed) -> None:
        """Take note that the optimizer is about to step, in a step that has an exchange."""
        self._before = packed.sample()
        self._scale = math.sqrt(packed.numel / len(self._before))

    def end_step(self, packed: Packed) -> None:
        """Take note that it has stepped, and the force is not yet applied."""
        if self._before is not None:
            self._step, self._before = packed.sample() - self._before, None

    def seen(self, metrics: ExchangeMetrics, center_norm: float) -> ExchangeMetrics:
        """Return `metrics` with what is known here; relative to a centre of that norm."""
        moved = float(self._moved)
        step = 0.0 if self._step is None else float(torch.linalg.vector_norm(self._step))
        return replace(
            metrics,
            age_s=self._age_s,
            center_move=moved,
            center_speed=moved / center_norm if center_norm else 0.0,
            step_norm=step * self._scale,
        )


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return |one - other| in one pass and without memory of their size; nobody waits for it."""
    size = _BLOCK if one.device.type == "cpu" else _DEVICE_BLOCK
    parts = [slice(begin, begin + size) for begin in range(0, one.numel(), size)]
    norms = [torch.linalg.vector_norm(one[part] - other[part]) for part in parts]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
