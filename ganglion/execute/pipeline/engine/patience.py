"""Patience: how long nothing has happened, and the end of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from ganglion.errors import PeerLost

_MOMENT_S = 1.0
_LOOK_S = 0.001


class Patience:
    """Counts from the first look that found nothing; whatever happens begins it anew."""

    def __init__(self, timeout_s: float, lost: Callable[[str], PeerLost]) -> None:
        """Last `timeout_s`; `lost(awaiting)` is the error at its end."""
        self._timeout_s = timeout_s
        self._lost = lost
        self._idle_since_s: float | None = None

    def reset(self) -> None:
        """Take note that something happened."""
        self._idle_since_s = None

    def is_young(self, age_s: float) -> bool:
        """Say whether the waiting began less than `age_s` ago."""
        return self._idle_since_s is not None and time.monotonic() < self._idle_since_s + age_s

    def check(self, awaiting: str) -> float:
        """Return how much longer to wait; raise if nothing has happened for too long."""
        now_s = time.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        left_s = self._idle_since_s + self._timeout_s - now_s
        if left_s <= 0:
            raise self._lost(awaiting)
        return left_s


def gets_done(is_done: Callable[[], bool]) -> bool:
    """Say whether something gets done within a moment."""
    end_s = time.monotonic() + _MOMENT_S
    while not (done := is_done()) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return done
