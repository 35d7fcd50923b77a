"""The length of a step, also of one that is reported late."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepWatch:
    """Measures steps from the end of one to the end of the next, without what lies between.

    A pipeline that is drained ends several steps before the first of them is reported: their ends
    count, not the moments of the reports. Evaluating and saving are nobody's step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin the first step now."""
        self._clock = clock
        self._ended_s = self._resumed_s = clock()
        self._reported_s = 0.0
        self._paused_s = 0.0

    def step_s(self, finished_s: float) -> float:
        """Return how long the step took that ended at `finished_s` and is reported now."""
        self._reported_s = self._clock()
        took_s = finished_s - self._ended_s
        self._ended_s = finished_s
        if finished_s >= self._resumed_s:  # it went on after the pauses, not before them
            took_s -= self._paused_s
            self._paused_s = 0.0
        return took_s

    def pause_over(self) -> None:
        """Say that all has been done about the last report."""
        self._resumed_s = self._clock()
        self._paused_s += self._resumed_s - self._reported_s
