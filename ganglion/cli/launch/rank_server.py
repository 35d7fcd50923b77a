"""A fork server for local ranks: torch is imported once for all of them, before they are needed.

    ganglion train ----- starts ------> fork server: imports torch and the training code
         |  imports torch elastic            |
         `- elastic asks for N ranks ------> forks each of them, with everything imported

The server has one thread and computes nothing, so a fork of it is as good as a new process: it may
set the number of its threads and use an accelerator. The server and its forks begin with SIGINT and
SIGTERM blocked, so a request to stop that arrives before a rank has a handler stays pending.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import forkserver, resource_tracker
from typing import NoReturn

import psutil

from ganglion.errors import LaunchError, PeerLost, PipelineError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CAUSE_FIRST_S = 2.0


def start_rank_server(module: str) -> None:
    """Start the fork server, which imports `module`, without waiting for it."""
    resource_tracker.ensure_running()  # first: its start leaves the signals unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        multiprocessing.set_forkserver_preload(["ganglion.cli.launch.rank_imports", module])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def rank_processes() -> list[psutil.Process]:
    """Return the running ranks, which are the children of the fork server."""
    helpers = psutil.Process().children()
    return [rank for helper in helpers for rank in _children(helper)]


def run_rank(module: str, *arguments: str) -> None:
    """Run `main(*arguments)` of `module` as a rank, in a session of its own.

    The terminal's Ctrl-C does not reach other sessions: `forwarded_signals` passes it on.
    """
    os.setsid()
    _end_with_parent()
    try:
        importlib.import_module(module).main(*arguments)
    except SystemExit as error:
        _fail(LaunchError(f"the rank called sys.exit({error.code!r})"))
    except Exception as error:
        _fail(error)
    _ignore_signals()


def _end_with_parent() -> None:
    """End this process as soon as its parent is gone, however that one died."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was not launched through multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _fail(error: Exception) -> NoReturn:
    """Record the error for the launcher, which shows the earliest one, and exit."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if _is_consequence(error):
        time.sleep(_CAUSE_FIRST_S)
    get_error_handler().record_exception(error)
    traceback.print_exception(error)
    sys.exit(1)


def accept_signals() -> None:
    """Make SIGINT and SIGTERM end this process, for a rank that has nothing to save."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _is_consequence(error: Exception) -> bool:
    """Return whether the error follows from one of another rank, lost or reporting a failure."""
    reported = isinstance(error, PipelineError) and error.__cause__ is None
    return reported or isinstance(error, PeerLost)


def _ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM from now on, since this rank has finished.

    Torch elastic waits for ever for a rank that a signal ends before all others have finished.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []
