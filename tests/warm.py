"""Processes of tests that begin with torch imported: forks of one server.

    pytest --- starts once ---> fork server: imports torch, the package, helpers of tests
                                     |- fork: a rank of tests.harness, a process of tests.crew
                                     `- fork: `ganglion train ...`, as tests.command runs it
                                                  `- fork: the fork server of its ranks
                                                              `- fork: rank 0, rank 1, ...

A fork is a fresh process: nothing that one test does is seen by the next. What differs from a start
of its own is that imports are done, and that environment variables which torch reads while it is
imported come from the server. Tests of the start itself use `tests.command.cold`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker, util
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload"])


class WarmProcess:
    """`python ARGUMENTS` as a fork of the server, with the methods of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.args = list(arguments)
        self._streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        weakref.finalize(self, _close_each, self._streams)
        self._process = CONTEXT.Process(
            target=_run_program,
            args=(self.args, str(cwd), dict(env), [_Inherited(s) for s in self._streams]),
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
        """Wait for the end; return what was printed to both streams."""
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


def _run_program(arguments: list[str], cwd: str, env: dict[str, str], streams: list[int]) -> None:
    """Do what the interpreter does with `-m MODULE ...` or `SCRIPT ...`."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # what the server chose
    util.spawnv_passfds = _fork_a_server  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # one of its own
    try:
        _run_as_main(arguments, cwd)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)


def _run_as_main(arguments: list[str], cwd: str) -> None:
    if arguments[0] == "-m":
        sys.path.insert(0, cwd)
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


_spawn = util.spawnv_passfds  # type: ignore[attr-defined]


def _fork_a_server(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start a program of multiprocessing; its servers begin with what is imported here."""
    code = str(arguments[-1])
    if not code.startswith(("from multiprocessing.forkserver", "from multiprocessing.resource_tr")):
        return int(_spawn(path, arguments, descriptors))
    process = os.fork()
    if process:
        return process
    # Held by the thread that is starting the server.
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
    try:
        _let_go_of_all_but({0, 1, 2, *descriptors})
        exec(code, {})
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(0)


def _let_go_of_all_but(kept: set[int]) -> None:
    """Close what the start of a program would close: above all the server's own lifeline.

    The numbers stay taken: objects of this process that own them may close them at any time.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in {*kept, nothing}:
            os.dup2(nothing, int(path.name), inheritable=False)
