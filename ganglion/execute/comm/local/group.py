"""Ranks as threads of one process: the transport of the tests.

Large matrices of layouts run as threads in milliseconds, with the collectives of the real thing
and a fixed order of reduction. Every member deposits its tensor; the last one to arrive combines
them in order of rank, so results never depend on arrival.

    results = run_threads(Mesh(data=4), lambda world: train(world))
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ganglion.decide.topology import Mesh
from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm.collectives import SUM, Group, Handle, SoloGroup
from ganglion.execute.comm.local.transport import Faults, LocalMail
from ganglion.execute.comm.reduce_order import combine as combine_in_order
from ganglion.execute.comm.reduce_order import combine_by_tree
from ganglion.execute.comm.transport import Transport
from ganglion.execute.comm.world import World
from ganglion.trace import Recorder

Result = TypeVar("Result")
Combine = Callable[[list[Tensor]], list[Tensor]]


class _Meeting:
    """One collective: deposits of all members, then the results."""

    def __init__(self, size: int) -> None:
        self.labels: list[str | None] = [None] * size
        self.num_waiting = size
        self.deposits: list[Tensor | None] = [None] * size
        self.results: list[Tensor] | None = None
        self.error: BaseException | None = None
        self.finished_s: float | None = None
        self.complete = threading.Event()
        self.lock = threading.Lock()


class _Exchange:
    """What the threads of one group share: the meetings, numbered in call order."""

    def __init__(self, ranks: tuple[int, ...], timeout_s: float, failed: str | None) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.meetings: dict[int, _Meeting] = {}
        self.has_common_memory = False
        self.common: dict[int, Tensor] = {}  # memory that all threads write to
        self.lock = threading.Lock()
        self.failed = failed

    def meeting(self, number: int) -> _Meeting:
        with self.lock:
            meeting = self.meetings.setdefault(number, _Meeting(len(self.ranks)))
            if self.failed is not None:
                meeting.complete.set()
            return meeting

    def leave(self, number: int) -> None:
        """Forget a meeting once all members have its result."""
        with self.lock:
            self.meetings[number].num_waiting -= 1
            if self.meetings[number].num_waiting == 0:
                del self.meetings[number]

    def fail(self, reason: str) -> None:
        """Wake every waiter with an error: a member will never come."""
        with self.lock:
            self.failed = self.failed or reason
            for meeting in self.meetings.values():
                meeting.complete.set()


class _LocalHandle:
    """Waits for a meeting and copies this member's result out of it."""

    def __init__(self, exchange: _Exchange, number: int, index: int, output: Tensor) -> None:
        self._exchange = exchange
        self._number = number
        self._index = index
        self._output = output
        self._waited = False
        self.started_s = time.perf_counter()
        self.finished_s: float | None = None

    def is_done(self) -> bool:
        """Say, without waiting, whether `wait` would return or raise at once."""
        return self._waited or self._exchange.meeting(self._number).complete.is_set()

    def wait(self) -> None:
        """Return when the result is in place."""
        if self._waited:
            return
        meeting = self._exchange.meeting(self._number)
        if not meeting.complete.wait(self._exchange.timeout_s):
            raise PeerLost(self._missing(meeting))
        if meeting.error is not None:
            raise meeting.error
        if meeting.results is None:
            raise PeerLost(f"{self._missing(meeting)}: {self._exchange.failed}")
        self._output.copy_(meeting.results[self._index])
        self.finished_s = meeting.finished_s
        self._waited = True
        self._exchange.leave(self._number)

    def _missing(self, meeting: _Meeting) -> str:
        absent = [
            rank
            for rank, label in zip(self._exchange.ranks, meeting.labels, strict=True)
            if label is None
        ]
        label = meeting.labels[self._index]
        return f"{label} of ranks {list(self._exchange.ranks)} lacks ranks {absent}"


class LocalGroup:
    """One thread's view of a group of threads."""

    def __init__(self, exchange: _Exchange, index: int) -> None:
        """Join `exchange` as its member at position `index`."""
        self._exchange = exchange
        self._number = 0
        self.ranks = exchange.ranks
        self.index = index
        self.size = len(exchange.ranks)

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        return self._meet(
            f"all_reduce({op})", tensor, tensor, lambda parts: [_combine(parts, op)] * self.size
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        return self._meet(
            "all_gather",
            tensor,
            output,
            lambda parts: [torch.cat([part.reshape(-1) for part in parts])] * self.size,
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        return self._meet(
            f"reduce_scatter({op})",
            tensor,
            output,
            lambda parts: list(_combine(parts, op).reshape(-1).chunk(self.size)),
        )

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        return self._meet(
            f"broadcast({root})", tensor, tensor, lambda parts: [parts[root]] * self.size
        )

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`."""

        def combine(parts: list[Tensor]) -> list[Tensor]:
            total = torch.empty_like(parts[root])
            combine_by_tree(parts, root, total, op)
            return [total if at == root else part for at, part in enumerate(parts)]

        return self._meet(f"reduce({op}, {root})", tensor, tensor, combine)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an ordinary tensor: threads share all memory."""
        return torch.empty(num_elements, dtype=dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor that whoever comes first makes, if threads act as if on one host."""
        if not self._exchange.has_common_memory:
            return None
        number, self._number = self._number, self._number + 1
        with self._exchange.lock:
            return self._exchange.common.setdefault(number, torch.empty(num_elements, dtype=dtype))

    def barrier(self) -> None:
        """Return when every member has arrived."""
        nothing = torch.zeros(0)
        self._meet("barrier", nothing, nothing, lambda parts: parts).wait()

    def close(self) -> None:
        """Hold nothing, release nothing."""

    def _meet(self, label: str, tensor: Tensor, output: Tensor, combine: Combine) -> Handle:
        number, self._number = self._number, self._number + 1
        meeting = self._exchange.meeting(number)
        with meeting.lock:
            meeting.labels[self.index] = label
            # A private copy: the caller may not touch the tensor, but results must not alias it.
            meeting.deposits[self.index] = tensor.detach().clone()
            parts = [part for part in meeting.deposits if part is not None]
            if len(parts) == self.size:
                self._settle(meeting, parts, combine)
        return _LocalHandle(self._exchange, number, self.index, output.detach().view(-1))

    def _settle(self, meeting: _Meeting, parts: list[Tensor], combine: Combine) -> None:
        labels = [str(label) for label in meeting.labels]
        if len(set(labels)) > 1 or len({part.numel() for part in parts}) > 1:
            sizes = [part.numel() for part in parts]
            found = dict(zip(self.ranks, zip(labels, sizes, strict=True), strict=True))
            meeting.error = ProtocolError(
                f"ranks called different collectives, or with different sizes: {found}"
            )
        else:
            meeting.results = [result.reshape(-1) for result in combine(parts)]
        meeting.finished_s = time.perf_counter()
        meeting.complete.set()


def _combine(parts: list[Tensor], op: str) -> Tensor:
    total = torch.empty_like(parts[0])
    combine_in_order(parts, total, op)
    return total


class LocalHub:
    """The shared part of a world of threads: one exchange per group of ranks."""

    def __init__(
        self,
        mesh: Mesh,
        timeout_s: float,
        faults: Faults | None = None,
        has_common_memory: bool = False,
    ) -> None:
        """Prepare for the ranks of `mesh`, whose messages suffer `faults`."""
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._exchanges: dict[tuple[tuple[str, ...], tuple[int, ...], int], _Exchange] = {}
        self._num_made: Counter[tuple[tuple[str, ...], int]] = Counter()
        self._lock = threading.Lock()
        self._failed: str | None = None
        self._mail: dict[tuple[tuple[str, ...], int], LocalMail] = {}
        self._num_opened: Counter[tuple[tuple[str, ...], int]] = Counter()
        self._faults = faults
        self._has_common_memory = has_common_memory

    def world(self, rank: int) -> World:
        """Return the world as one thread sees it."""

        def group_along(axes: tuple[str, ...]) -> Group:
            ranks = self._mesh.group_of(rank, axes)
            if len(ranks) == 1:
                return SoloGroup(rank)
            with self._lock:
                number = self._num_made[axes, rank]
                self._num_made[axes, rank] += 1
                # A group made after a failure must not wait for a rank that will never come.
                exchange = self._exchanges.setdefault(
                    (axes, ranks, number), _Exchange(ranks, self._timeout_s, self._failed)
                )
                exchange.has_common_memory = self._has_common_memory
            return LocalGroup(exchange, ranks.index(rank))

        def transport_along(axes: tuple[str, ...], trace: Recorder | None) -> Transport:
            ranks = self._mesh.group_of(rank, axes)
            return self._mailbox(axes, rank).transport(rank, trace, ranks)

        return World(rank, self._mesh, group_along, transport_along, way="local")

    def _mailbox(self, axes: tuple[str, ...], rank: int) -> LocalMail:
        """Return the mail that all ranks share which open their next transport along `axes`."""
        with self._lock:
            number = self._num_opened[axes, rank]
            self._num_opened[axes, rank] += 1
            if (axes, number) not in self._mail:
                self._mail[axes, number] = LocalMail(self._mesh.num_ranks, self._faults)
            return self._mail[axes, number]

    def fail(self, rank: int, reason: str) -> None:
        """Wake all threads that wait now or later: one of them has failed."""
        with self._lock:
            self._failed = self._failed or reason
            exchanges = list(self._exchanges.values())
            mail = list(self._mail.values())
        for exchange in exchanges:
            exchange.fail(reason)
        for letters in mail:
            letters.lose(rank, reason)


def run_threads(
    mesh: Mesh,
    body: Callable[[World], Result],
    *,
    timeout_s: float = 60.0,
    faults: Faults | None = None,
    has_common_memory: bool = False,
) -> list[Result]:
    """Run `body` once per rank of `mesh`, each in a thread; return the results by rank.

    With `has_common_memory` threads share memory as processes of one host do; else they only talk,
    as ranks anywhere.

    The first error that is not a consequence of another rank's failure is raised.
    """
    hub = LocalHub(mesh, timeout_s, faults, has_common_memory)

    def guarded(rank: int) -> Result:
        try:
            return body(hub.world(rank))
        except BaseException as error:
            hub.fail(rank, f"rank {rank} failed with {type(error).__name__}: {error}")
            raise

    with ThreadPoolExecutor(mesh.num_ranks, thread_name_prefix="rank") as pool:
        futures = [pool.submit(guarded, rank) for rank in range(mesh.num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, CommError)]
    for error in (*causes, *errors):
        raise error
    return [future.result() for future in futures]
