"""Asking the command line in this process: what it prints, and how it ends.

Starting Python and importing torch takes longer than most answers. `tests/support/command.py`
starts a process, for tests that need one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.support.absent import without_torch


def ganglion(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Call `ganglion ...` in a folder; return what it printed and its exit code."""
    from ganglion.cli.main import main

    shown, told, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", ["ganglion", *words]),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(told),
        _handlers_kept(),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, shown.getvalue(), told.getvalue())


class TorchlessCommand:
    """The same where torch does not exist; whoever asks for it fails, even if it would do without.

    What it imports inside is kept from one command to the next.
    """

    def __init__(self) -> None:
        self._apart = without_torch()

    def __call__(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        with self._apart:
            from tests.support.answers import (
                ganglion as answer,  # imported anew: it has not seen torch
            )

            result = answer(*words, cwd=cwd)
        assert not self._apart.refused, f"{words} imports {self._apart.refused}"
        return result


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Take away the handlers that a command adds to the loggers of the process."""
    loggers = [logging.getLogger(name) for name in (None, "ganglion")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level in before:
            for handler in set(logger.handlers) - set(handlers):
                handler.close()
            logger.handlers[:] = handlers
            logger.setLevel(level)
