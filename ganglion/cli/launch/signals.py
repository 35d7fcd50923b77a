"""Ctrl-C and SIGTERM: the first signal asks for a clean stop, the second ends at once.

    command: forwarded_signals() --- passes each signal on ---> rank: StopSignal calls an action

Ranks live in sessions of their own, so the terminal's Ctrl-C does not reach them by itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil
import typer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOPPING = "\nstopping after this step, with a checkpoint (again: at once)"
_LOOK_AGAIN_S = 0.1
_GIVE_UP_S = 10.0


def child_processes() -> list[psutil.Process]:
    """Return the children of this process."""
    return psutil.Process().children()


@contextmanager
def forwarded_signals(
    message: str = _STOPPING, find: Callable[[], list[psutil.Process]] = child_processes
) -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on to the processes of `find`; yield the list of signals received.

    The handler raises nothing, since other code might swallow it. A process that starts after the
    signal gets it too.
    """
    received: list[int] = []
    ended = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        again = len(received) > 1
        if not again:
            typer.echo(message, err=True)
        passed_on = signal.SIGKILL if again else signal.SIGINT
        arguments = (find, passed_on, ended)
        threading.Thread(target=_pass_on, args=arguments, name="forwarding", daemon=True).start()

    before = {s: signal.signal(s, handle) for s in _SIGNALS}
    try:
        yield received
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(
    find: Callable[[], list[psutil.Process]], number: signal.Signals, ended: threading.Event
) -> None:
    """Send the signal once to each process, also to those that start later.

    After SIGKILL this process ends too, even if the launcher still waits for the killed ranks.
    """
    signalled: set[psutil.Process] = set()
    end_s = time.monotonic() + _GIVE_UP_S
    while not ended.is_set():
        if number == signal.SIGKILL and time.monotonic() > end_s:
            os._exit(128 + signal.SIGINT)
        for process in set(find()) - signalled:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
            signalled.add(process)
        ended.wait(_LOOK_AGAIN_S)


class StopSignal:
    """Ctrl-C and SIGTERM in a rank: they call an action, as soon as there is one."""

    def __init__(self, *, end_on_second: bool) -> None:
        """Begin without a signal and without an action; `end_on_second`: exit at a second one."""
        self._end_on_second = end_on_second
        self._received = 0
        self._action: Callable[[], None] | None = None

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect: 0, or 128 + the number of the signal."""
        return 128 + self._received if self._received else 0

    def call(self, action: Callable[[], None]) -> None:
        """Call `action` when a signal comes, or now if one has come already."""
        self._action = action
        if self._received:
            action()

    def __enter__(self) -> StopSignal:
        """Install the handlers and unblock the signals, so that pending ones arrive now."""
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received and self._end_on_second:
            os._exit(128 + number)
        self._received = self._received or number
        if self._action is not None:
            self._action()
