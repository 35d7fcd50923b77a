"""Signals for workers: the first asks them to stop cleanly, the second ends them at once.

Workers live in sessions of their own, so the terminal's Ctrl-C does not reach them by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil
import typer

_STOPPING = "\nstopping after this step, with a checkpoint (again: at once)"


@contextmanager
def forwarded_signals(message: str = _STOPPING) -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on to child processes; yield the list of what was received.

    Nothing is raised inside the handler, where other people's code might swallow it: a signal that
    comes before there is a child is in the list, for who starts the children to see.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        again = len(received) > 1
        if not again:
            typer.echo(message, err=True)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGKILL if again else signal.SIGINT)

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
