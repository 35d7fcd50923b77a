"""What the ranks of the communication benchmark run: one timed turn after the other.

    python -m benchmarks.comm.ranks WORLD ADDRESS PARENT_PID [RANK NUM_RANKS PORT]

A rank connects to the benchmark at the abstract Unix socket ADDRESS, says its rank, then answers
each task (a line of JSON) with the seconds it took, asleep in between. Three kinds of WORLD:

    torch     the ways shm, gloo and torch, in the same processes
    mpich     plain mpi4py, under mpiexec
    mpi       Ganglion over MPI, under mpiexec
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.comm.ways import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Way, open_ways

LIFETIME_S = 1800.0
MATMUL_SIZE = 128
READ, COMPUTING, ALLOCATED = "read", "computing", "allocated"


@dataclass(frozen=True)
class Task:
    """One turn: what is timed, over which way, how often.

    `num_bytes` of a collective is what a member has before (reduce) or after it (gather).
    """

    way: str
    verb: str  # "send" or a collective
    variant: str  # READ, COMPUTING, ALLOCATED or ""
    num_bytes: int
    repetitions: int
    warm_ups: int
    messages: int = 1  # of one repetition, while computing
    matmuls: int = 1  # for each of these messages


# --- the turns ---------------------------------------------------------------------------------


def run(way: Way, task: Task) -> list[float]:
    """Return this rank's seconds of every repetition; an empty list if another rank's count."""
    if task.verb != "send":
        return collective_calls(way, task)
    return computing(way, task) if task.variant == COMPUTING else ping_pong(way, task)


def ping_pong(way: Way, task: Task) -> list[float]:
    """Time messages there and back; half of it is one way, with one read if that is asked for."""
    wire = way.wire(task.num_bytes)
    reads = task.variant == READ
    seconds: list[float] = []
    for _ in range(task.warm_ups + task.repetitions):
        start_s = time.perf_counter()
        if way.rank == 0:
            wire.send()
        arrived = wire.receive()
        if reads:
            arrived.sum()
        if not seconds:  # once: looking at numbers costs as much as a message
            _check(arrived, 2.0 - way.rank)
        del arrived  # so that its memory can be used for the next one
        if way.rank:
            wire.send()
        seconds.append((time.perf_counter() - start_s) / 2)
    return seconds[task.warm_ups :] if way.rank == 0 else []


def computing(way: Way, task: Task) -> list[float]:
    """Time what a message adds to a loop of computing and reading as much as arrives."""
    wire = way.wire(task.num_bytes)
    own = torch.ones(task.num_bytes // 4)
    work = _matmuls(task.matmuls)

    def alone() -> None:
        work()
        own.sum()

    def together() -> None:
        wire.exchange(work).sum()

    _check(wire.exchange(work), 2.0 - way.rank)
    extras = []
    for _ in range(task.warm_ups + task.repetitions):
        alone_s = _loop_s(way, alone, task.messages)
        together_s = _loop_s(way, together, task.messages)
        extras.append((together_s - alone_s) / task.messages)
    return extras[task.warm_ups :]


def collective_calls(way: Way, task: Task) -> list[float]:
    """Time calls that follow one another without a pause."""
    whole, part = task.num_bytes // 4, task.num_bytes // 4 // way.num_ranks
    allocate = way.allocate if task.variant == ALLOCATED else torch.empty
    tensor = allocate(part if task.verb == ALL_GATHER else whole).fill_(1.0)
    output = tensor if task.verb == ALL_REDUCE else torch.empty(way.num_ranks * part)
    if task.verb == REDUCE_SCATTER:
        output = torch.empty(part)
    call = way.collective(task.verb, output, tensor)
    call()
    _check(output, 1.0 if task.verb == ALL_GATHER else float(way.num_ranks))
    tensor.zero_()  # sums of sums of ones would not stay numbers
    way.barrier()
    return [_timed(call) for _ in range(task.warm_ups + task.repetitions)][task.warm_ups :]


def _loop_s(way: Way, step: Callable[[], None], times: int) -> float:
    way.barrier()
    start_s = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - start_s


def _timed(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _matmuls(times: int) -> Callable[[], None]:
    left = torch.ones(MATMUL_SIZE, MATMUL_SIZE) / MATMUL_SIZE
    result = torch.empty_like(left)

    def work() -> None:
        for _ in range(times):
            torch.mm(left, left, out=result)

    return work


def _check(tensor: Tensor, expected: float) -> None:
    """A contestant that is fast and wrong does not count."""
    ends = (tensor[0].item(), tensor[-1].item())
    if ends != (expected, expected):
        raise ValueError(f"{tensor.numel()} numbers with ends {ends} arrived, not {expected}")


# --- the process -------------------------------------------------------------------------------


def end_with(parent: int) -> None:
    """End this process when its parent is gone, and after its lifetime in any case."""
    descriptor = os.pidfd_open(parent)

    def watch() -> None:
        select.select([descriptor], [], [], LIFETIME_S)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main() -> None:
    world, address, parent, *arguments = sys.argv[1:]
    end_with(int(parent))
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect("\0" + address)
        with connection.makefile("rw", encoding="utf-8") as stream:
            try:
                ways = open_ways(world, arguments)
                _tell(stream, {"rank": next(iter(ways.values())).rank})
                while (line := stream.readline()) not in ("", "end\n"):
                    task = Task(**json.loads(line))
                    _tell(stream, {"seconds": run(ways[task.way], task)})
                for way in ways.values():
                    way.close()
            except Exception:
                _tell(stream, {"error": traceback.format_exc()})
                os._exit(1)  # the others may wait for this rank for ever: mpiexec ends them


def _tell(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
