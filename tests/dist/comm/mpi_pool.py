"""Ranks under mpiexec that run bodies one after the other, as those of tests.support.harness do.

Every rank connects to a Unix socket of the test, which then is its pipe:

    mpiexec -n N python -m tests.dist.comm.mpi_pool FOLDER
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil

from tests.support.command import environment
from tests.support.harness import START_DEADLINE_S, RankFailed, RankPool, call
from tests.support.warm_python import warm_python

_SOCKET = "pipe"
_PARTING_S = 5.0


class MpiPool(RankPool):
    """A fixed number of processes of one mpiexec."""

    def __init__(self, num_ranks: int, mpiexec: str) -> None:
        self.num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        self._printed = (folder / "printed").open("w+")
        with Listener(str(folder / _SOCKET), "AF_UNIX", backlog=num_ranks) as listener:
            self._mpiexec = subprocess.Popen(
                [mpiexec, "-n", str(num_ranks), warm_python(), "-m", __name__, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env=environment(),
                start_new_session=True,
            )
            greeted = self._accept_all(listener)
        self._pipes = [pipe for _, _, pipe in greeted]
        self._processes = [_Process(pid) for _, pid, _ in greeted]  # type: ignore[misc]

    def _accept_all(self, listener: Listener) -> list[tuple[int, int, Connection]]:
        """Return (rank, process, pipe) of all ranks, in order."""
        listener._listener._socket.settimeout(START_DEADLINE_S)  # type: ignore[attr-defined]
        try:
            pipes = [listener.accept() for _ in range(self.num_ranks)]
        except TimeoutError as error:
            self._mpiexec.kill()
            raise RankFailed("the ranks of mpiexec did not come") from error
        return sorted(((*pipe.recv(), pipe) for pipe in pipes), key=lambda each: each[0])

    def end(self) -> tuple[int, str]:
        """Let the ranks end by themselves; return mpiexec's code and all that was printed."""
        for pipe in self._pipes:
            pipe.close()
        code = self._mpiexec.wait(START_DEADLINE_S)
        self._printed.seek(0)
        with self._printed as printed:
            text = printed.read()
        self._folder.cleanup()
        return code, text

    def close(self) -> None:
        """End mpiexec and its ranks; those that are killed leave a segment of MPICH behind."""
        for pipe in self._pipes:
            pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpiexec.wait(_PARTING_S)
        self._mpiexec.kill()
        self._mpiexec.wait()
        self._printed.close()
        super().close()


class _Process:
    """A rank, which mpiexec started and not this process."""

    exitcode = "unknown: it is mpiexec's"

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait(timeout_s)


@functools.cache
def meeting() -> Any:
    """Return the meeting of all ranks of this mpiexec."""
    from ganglion.execute.comm.mpi.world import MpiGroupFactory

    return MpiGroupFactory(timeout_s=60.0)


def main() -> None:
    """Serve as a rank."""
    import torch

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    rank, num_ranks = meeting().rank, meeting().num_ranks
    with (folder / f"stack{rank}").open("w") as stacks, Client(str(folder / _SOCKET)) as pipe:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        pipe.send((rank, os.getpid()))
        with contextlib.suppress(EOFError):
            while True:
                pipe.send(call(pipe.recv(), rank, num_ranks))


if __name__ == "__main__":
    # The bodies import this module by its name: there must be one `meeting`.
    from tests.dist.comm import mpi_pool

    mpi_pool.main()
