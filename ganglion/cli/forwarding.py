"""Signals for ranks: the first asks them to stop cleanly, the second ends them at once.

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

_STOPPING = "\nstopping after this step, with a checkpoint (again: at once)"
_LOOK_AGAIN_S = 0.1
_GIVE_UP_S = 10.0


def child_processes() -> list[psutil.Process]:
    """Return the processes that this one started."""
    return psutil.Process().children()


@contextmanager
def forwarded_signals(
    message: str = _STOPPING, find: Callable[[], list[psutil.Process]] = child_processes
) -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on to the processes of `find`; yield the list of signals received.

    Nothing is raised inside the handler, where other code might swallow it. A process that starts
    after the signal gets it too.
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

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
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

    Who asked a second time does not wait for a launcher that waits for ranks which were killed.
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
