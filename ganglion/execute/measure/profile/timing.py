"""Times of short calls on a machine that does other things, too.

While another process has the core, a call takes longer without doing more. Linux counts how long
each thread has waited for a core; that time is taken off, and of all repetitions the half that
waited least counts, and of these the median. Elsewhere the quicker half counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_LEAST, _MOST = 5, 400

Mark = tuple[float, float]  # the time, and how long this thread has waited for a core so far
Taken = tuple[float, float]  # seconds, and those among them in which it waited for a core


class Watch:
    """Times calls on one device."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        """Spend about `budget_s` on the repetitions of a call."""
        self.device = device
        self.budget_s = budget_s
        self._counts = _SCHEDSTAT.exists()

    def finish(self) -> None:
        """Return when the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def waited_s(self) -> float:
        """Return how long this thread has waited for a core so far; 0 where it is not known."""
        return int(_SCHEDSTAT.read_text().split()[1]) * 1e-9 if self._counts else 0.0

    def num_repeats(self, call: Callable[[], object]) -> int:
        """Return how often a call fits into the budget, after one call that warms up."""
        call()
        self.finish()
        took_s, _ = self.once(call)
        return max(_LEAST, min(_MOST, round(self.budget_s / max(took_s, 1e-7))))

    def time_s(self, call: Callable[[], object], num_repeats: int | None = None) -> float:
        """Return the seconds of a call."""
        repeats = self.num_repeats(call) if num_repeats is None else num_repeats
        return undisturbed([self.once(call) for _ in range(repeats)])

    def mark(self) -> Mark:
        """Return the time when the device has finished."""
        self.finish()
        return time.perf_counter(), self.waited_s()

    def once(self, call: Callable[[], object]) -> Taken:
        """Return the seconds of a call."""
        before = self.mark()
        call()
        return since(before, self.mark())


def since(before: Mark, after: Mark) -> Taken:
    """Return the seconds between two marks."""
    return after[0] - before[0], after[1] - before[1]


def undisturbed(taken: Sequence[Taken]) -> float:
    """Return the median of what waited least, without the waits."""
    own = [(waited_s / taken_s, taken_s - waited_s) for taken_s, waited_s in taken]
    return median([own_s for _, own_s in sorted(own)[: -(-len(own) // 2)]])
