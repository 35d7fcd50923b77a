"""Commands run in this process, for their output and exit code.

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
    """Call `ganglion ...` in a folder; return its output and exit code."""
    from ganglion.cli.main import main

    output, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", ["ganglion", *words]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        _handlers_kept(),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())


class TorchlessCommand:
    """The same where torch does not exist: any import of it fails the test, even if it is caught.

    Modules imported inside are kept from one command to the next.
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
