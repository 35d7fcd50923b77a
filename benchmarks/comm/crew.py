"""The ranks of the communication benchmark: sets of processes, one of which has its turn.

They are told what to do over Unix sockets without a file, so that ranks that mpiexec starts and
others are the same to the benchmark, and end when the benchmark ends, however that happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from benchmarks.comm.ranks import Task

START_DEADLINE_S, TURN_DEADLINE_S, END_DEADLINE_S = 120.0, 120.0, 10.0
WAYS_OF = {"torch": ("shm", "gloo", "torch"), "mpich": ("mpich",), "mpi": ("mpi",)}
# Our MPI thread looks for work this long after the last; nobody shall be disturbed by that.
SETTLE_S = {"torch": 0.0, "mpich": 0.0, "mpi": 0.06}


class Crew:
    """The ranks of one world, asleep unless they have their turn."""

    def __init__(self, world: str, num_ranks: int, mpiexec: str | None) -> None:
        self._settle_s = SETTLE_S[world]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: dict[socket.socket, Any] = {}
        address = f"ganglion-bench-{secrets.token_hex(16)}"
        rank = [sys.executable, "-m", "benchmarks.comm.ranks", world, address, str(os.getpid())]
        self._num_ranks = num_ranks
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + address)
        self._listener.listen(num_ranks)
        if world == "torch":
            self._start_torch(rank, num_ranks)
        else:
            assert mpiexec is not None
            self._start([mpiexec, "-n", str(num_ranks), *rank])

    def meet(self) -> None:
        """Return when all ranks are there and know each other."""
        end_s = time.monotonic() + START_DEADLINE_S
        self._listener.settimeout(0.2)
        while len(self._streams) < self._num_ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                codes = [code for each in self._processes if (code := each.poll()) is not None]
                if codes or time.monotonic() > end_s:
                    raise RuntimeError(f"ranks did not start; exit codes {codes}") from None
            else:
                self._streams[connection] = connection.makefile("rw", encoding="utf-8")
        self._answers(START_DEADLINE_S)

    def run(self, task: Task) -> list[float]:
        """Let the ranks have a turn; return the seconds of its repetitions, means over ranks."""
        for stream in self._streams.values():
            stream.write(json.dumps(asdict(task)) + "\n")
            stream.flush()
        by_rank = [answer["seconds"] for answer in self._answers(TURN_DEADLINE_S)]
        time.sleep(self._settle_s)
        return [statistics.fmean(s) for s in zip(*filter(None, by_rank), strict=True)]

    def close(self) -> None:
        """Let the ranks end by themselves."""
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                stream.write("end\n")
                stream.flush()
        end_s = time.monotonic() + END_DEADLINE_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end_s - time.monotonic()))

    def kill(self) -> None:
        """End what is left."""
        self._listener.close()
        for connection, stream in self._streams.items():
            with contextlib.suppress(OSError):
                stream.close()
            connection.close()
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start_torch(self, command: list[str], num_ranks: int) -> None:
        make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = make_store("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(num_ranks):
            self._start([*command, str(rank), str(num_ranks), str(self._store.port)])

    def _start(self, command: list[str]) -> None:
        # A session for each rank, as torchrun gives them: Linux may schedule processes by session,
        # and who yields the core then yields it only inside its own.
        quiet = subprocess.DEVNULL
        self._processes.append(
            subprocess.Popen(command, stdin=quiet, stdout=quiet, start_new_session=True)
        )

    def _answers(self, deadline_s: float) -> list[dict[str, Any]]:
        """Return one answer of every rank; raise the first failure."""
        end_s = time.monotonic() + deadline_s
        answers, late = [], set(self._streams)
        while late:
            ready, _, _ = select.select(list(late), [], [], max(0.0, end_s - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{len(late)} ranks did not answer within {deadline_s:g} s")
            for connection in ready:
                line = self._streams[connection].readline()
                answer = json.loads(line) if line else {"error": "a rank died"}
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                answers.append(answer)
                late.remove(connection)
        return answers


@contextlib.contextmanager
def open_crews(num_ranks: int, ways: set[str], mpiexec: str | None) -> Iterator[dict[str, Crew]]:
    """Start the worlds that `ways` need; yield the crew of each way."""
    crews: list[Crew] = []
    by_way: dict[str, Crew] = {}
    try:
        for world, its_ways in WAYS_OF.items():
            if ways & set(its_ways) and (world == "torch" or mpiexec is not None):
                crews.append(Crew(world, num_ranks, mpiexec))
                by_way |= dict.fromkeys(its_ways, crews[-1])
        for crew in crews:
            crew.meet()
        yield by_way
        for crew in crews:
            crew.close()
    finally:
        for crew in crews:
            crew.kill()
