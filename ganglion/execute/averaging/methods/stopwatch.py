"""Where the time of a loop goes, by the names of the paper's table, seen from the hooks alone.

    step ends      forward begins          step begins    step ends
    |--- data_host_dev ---|---- fwd_bwd ----|-- upd_dev ---|

What the worker waits for exchanges is inside upd_dev and taken out of it as param_dev_dev.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Adds up the parts of all steps so far."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin at zero."""
        self._clock = clock
        self._last_s = clock()
        self._in_pass = False
        self._spent = {"data_host_dev": 0.0, "fwd_bwd": 0.0, "upd_dev": 0.0}

    def resume(self) -> None:
        """Count from now on: what passed since the last mark belongs to no step."""
        self._last_s = self._clock()
        self._in_pass = False

    def begin_pass(self) -> None:
        """Mark the first forward of a step; later ones are part of the same pass."""
        if not self._in_pass:
            self._mark("data_host_dev")
            self._in_pass = True

    def end_pass(self) -> None:
        """Mark that the optimizer is about to step."""
        self._mark("fwd_bwd")
        self._in_pass = False

    def end_step(self) -> None:
        """Mark that the step and its exchange are over."""
        self._mark("upd_dev")

    def seconds(self, wait_s: float) -> dict[str, float]:
        """Return the seconds of each part, with `wait_s` of them spent on communication."""
        update_s = max(0.0, self._spent["upd_dev"] - wait_s)
        return {**self._spent, "upd_dev": update_s, "param_dev_dev": wait_s}

    def _mark(self, part: str) -> None:
        now_s = self._clock()
        self._spent[part] += now_s - self._last_s
        self._last_s = now_s
