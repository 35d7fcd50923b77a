"""Real ranks for tests: warm processes over Gloo, fresh for every call.

    def body(world: World, scale: int) -> float: ...      # a module-level function

    def test_something(ranks: Ranks) -> None:
        results = ranks.run(2, body, 3)                    # one result per rank

Rendezvous goes through a file, so tests never compete for a port. A body that overruns its
deadline has all its ranks' stacks dumped into the error. A child's traceback is raised in the
parent, a child's skip is the test's skip.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm import CONTEXT

DEADLINE_S = 60.0
TEST = "PYTEST_CURRENT_TEST"  # the environment's name for the test that runs
START_DEADLINE_S = 90.0


class RankFailed(AssertionError):
    """A body raised on some rank; the message holds that rank's traceback."""


@dataclass
class _Reply:
    kind: str  # "ok", "skip" or "error"
    value: Any


class RankPool:
    """A fixed number of processes that run bodies one after the other, until it is closed."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(num_ranks):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(rank, num_ranks, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(START_DEADLINE_S)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], deadline_s: float) -> list[Any]:
        """Run `body(world, *args)` on every rank and return the results by rank."""
        for pipe in self._pipes:
            pipe.send((os.environ.get(TEST, ""), body.__module__, body.__qualname__, args))
        replies = self._collect(deadline_s)
        failures = [(r, reply.value) for r, reply in enumerate(replies) if reply.kind == "error"]
        if failures:
            raise RankFailed("\n".join(f"rank {rank}:\n{trace}" for rank, trace in failures))
        skips = [reply.value for reply in replies if reply.kind == "skip"]
        if skips:
            pytest.skip(skips[0])
        return [reply.value for reply in replies]

    def close(self) -> None:
        """End the processes this pool started, and only those."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _collect(self, deadline_s: float) -> list[_Reply]:
        """Wait for every rank; once one has failed, the others get little more time."""
        end_s = time.monotonic() + deadline_s
        replies: dict[int, _Reply] = {}
        while len(replies) < self.num_ranks:
            for rank in set(range(self.num_ranks)) - set(replies):
                if self._pipes[rank].poll(0.01):
                    replies[rank] = self._receive(rank)
                    if replies[rank].kind == "error":
                        end_s = min(end_s, time.monotonic() + 5)
            if time.monotonic() > end_s:
                return self._overrun(replies, deadline_s)
        return [replies[rank] for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> _Reply:
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(5)
            return _Reply("error", f"the process died, exit code {self._processes[rank].exitcode}")
        return _Reply(kind, value)

    def _overrun(self, replies: dict[int, _Reply], deadline_s: float) -> list[_Reply]:
        missing = sorted(set(range(self.num_ranks)) - set(replies))
        for rank in missing:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        errors = [
            f"rank {r}:\n{reply.value}" for r, reply in replies.items() if reply.kind == "error"
        ]
        stacks = [
            f"rank {rank} was here:\n{(Path(self._folder.name) / f'stack{rank}').read_text()}"
            for rank in missing
        ]
        reason = f"ranks {missing} did not answer within {deadline_s} s (or 5 s after a failure)"
        raise RankFailed("\n".join([reason, *errors, *stacks]))


def _serve(rank: int, num_ranks: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    with (Path(folder) / f"stack{rank}").open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        pipe.send(("ok", None))
        while True:
            pipe.send(call(pipe.recv(), rank, num_ranks))


def call(task: tuple[str, str, str, tuple[Any, ...]], rank: int, num_ranks: int) -> tuple[str, Any]:
    """Run the body that a test sent; return the kind of the reply and its value."""
    import torch

    from ganglion.decide.topology import Mesh
    from ganglion.execute.comm import torch_world

    os.environ[TEST], module, name, args = task
    try:
        body = importlib.import_module(module)
        for part in name.split("."):
            body = getattr(body, part)
        torch.manual_seed(0)
        world = torch_world(rank, Mesh(data=num_ranks), timeout_s=DEADLINE_S)
        return "ok", body(world, *args)  # type: ignore[operator]
    except pytest.skip.Exception as skip:
        return "skip", str(skip)
    except BaseException:
        return "error", traceback.format_exc()


class Ranks:
    """The fixture `ranks`: every call gets processes of its own."""

    def run(
        self,
        num_ranks: int,
        body: Callable[..., Any],
        *args: Any,
        deadline_s: float = DEADLINE_S,
    ) -> list[Any]:
        """Run `body(world, *args)` on `num_ranks` processes; return the results by rank."""
        pool = RankPool(num_ranks)
        try:
            return pool.run(body, args, deadline_s)
        finally:
            pool.close()
