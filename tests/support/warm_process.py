"""`python ...` as a fork of the server of warm processes, as tests.support.command runs it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from tests.support.warm import CONTEXT, run_program
from tests.support.warm_python import warm_python


class WarmProcess:
    """`python ARGUMENTS` as a fork of the server, with the methods of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.args = list(arguments)
        self._streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        for stream in self._streams:  # that several processes may write to
            fcntl.fcntl(stream, fcntl.F_SETFL, os.O_APPEND)
        weakref.finalize(self, _close_each, self._streams)
        streams = [_Inherited(stream) for stream in self._streams]
        self._process = CONTEXT.Process(
            target=_run_with_streams,
            args=(self.args, str(cwd), dict(env), streams, warm_python()),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *self._printed())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return the text of both streams."""
        self.wait(timeout)
        output, errors = self._printed()
        return output, errors

    def _printed(self) -> list[str]:
        """Read without moving the position at which the process writes, which is shared."""
        texts = [os.pread(stream, os.fstat(stream).st_size, 0) for stream in self._streams]
        return [text.decode(errors="replace") for text in texts]


def _close_each(streams: list[int]) -> None:
    for stream in streams:
        os.close(stream)


class _Inherited:
    """A file descriptor that a process gets from the one that starts it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self._number),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _run_with_streams(
    arguments: list[str], cwd: str, env: dict[str, str], streams: list[int], executable: str
) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    run_program(arguments, cwd, env, executable)
