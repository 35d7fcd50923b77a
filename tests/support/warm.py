"""Processes of tests that begin with torch imported: forks of one server.

    pytest --- starts once ---> fork server: imports torch, the package, helpers of tests
                                     |- fork: a rank of harness.py, a process of crew.py
                                     `- fork: `ganglion train ...`, as command.py runs it
                                                  `- fork: the fork server of its ranks
                                                              `- fork: rank 0, rank 1, ...

A fork is a fresh process: nothing leaks from one test to the next. It differs from a new process in
two ways: imports are done, and environment variables that torch reads while it is imported come
from the server. Tests of the start itself use `tests.support.command.cold`.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, spawn, util
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preload"])


def run_program(arguments: list[str], cwd: str, env: dict[str, str], executable: str) -> None:
    """Run `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...` as the interpreter does, and exit."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.executable = executable
    spawn.set_executable(executable)
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    tempfile.tempdir = None  # the choice of the server
    util.spawnv_passfds = _fork_a_server  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # one of its own
    _exit(_code_of([*itertools.dropwhile(_is_flag, arguments)], cwd))


def _code_of(arguments: list[str], cwd: str) -> int:
    """Run a program; return the code with which it ends."""
    try:
        _run_as_main(arguments, cwd)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _is_flag(argument: str) -> bool:
    """Return whether it is one of those that multiprocessing and torchrun pass on."""
    return argument.startswith(("-u", "-B", "-X", "-W"))


def _run_as_main(arguments: list[str], cwd: str) -> None:
    if arguments[0] == "-m":
        sys.path.insert(0, cwd)
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _exit(code: int) -> None:
    """Exit as an interpreter does, without taking modules apart, which takes 0.2 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.PyDLL(None).exit(code)  # with handlers of C libraries: MPICH's signs off from mpiexec


_spawn = util.spawnv_passfds  # type: ignore[attr-defined]


def _fork_a_server(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start a program of multiprocessing; its servers begin with the imports of this process."""
    code = str(arguments[-1])
    if not code.startswith(("from multiprocessing.forkserver", "from multiprocessing.resource_tr")):
        return int(_spawn(path, arguments, descriptors))
    process = os.fork()
    if process:
        return process
    # Held by the thread that is starting the server.
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
    try:
        _close_all_but({0, 1, 2, *descriptors})
        exec(code, {})
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    """Close the files that the start of a program would close, such as the server's own lifeline.

    The numbers stay taken: objects of this process that own them may close them at any time.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in {*kept, nothing}:
            os.dup2(nothing, int(path.name), inheritable=False)
