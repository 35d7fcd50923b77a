"""Stopping on request: the first signal asks for a clean stop, a second one ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Turns signals into a call, made when there is somebody to call."""

    def __init__(self, *, end_on_second: bool) -> None:
        """Watch for Ctrl-C and SIGTERM; nothing received yet and nobody to call."""
        self._end_on_second = end_on_second
        self._received = 0
        self._action: Callable[[], None] | None = None

    @property
    def exit_code(self) -> int:
        """What the shell expects: 0, or 128 + the number of the signal."""
        return 128 + self._received if self._received else 0

    def call(self, action: Callable[[], None]) -> None:
        """Call `action` when a signal comes, or now if one has come already."""
        self._action = action
        if self._received:
            action()

    def __enter__(self) -> StopSignal:
        """Take over the signals; those that had to wait for a handler arrive now."""
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received and self._end_on_second:
            os._exit(128 + number)
        self._received = self._received or number
        if self._action is not None:
            self._action()
