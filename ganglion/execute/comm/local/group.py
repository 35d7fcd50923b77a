"""Ranks as threads of one process, for tests: large matrices of layouts run in milliseconds.

Every member deposits its tensor; the last one to arrive combines them in order of rank, so results
never depend on the order of arrival.

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
from ganglion.execute.comm.collectives import SUM, BaseGroup, Group, Handle, SoloGroup
from ganglion.execute.comm.local.transport import Faults, LocalMailboxes
from ganglion.execute.comm.reduce_order import combine as combine_in_order
from ganglion.execute.comm.reduce_order import combine_by_tree
from ganglion.execute.comm.transport import Transport
from ganglion.execute.comm.world import World
from ganglion.trace import Recorder

Result = TypeVar("Result")
Combine = Callable[[list[Tensor]], list[Tensor]]


class _Collective:
    """One collective: the deposits of all members, then the results."""

    def __init__(self, size: int) -> None:
        self.labels: list[str | None] = [None] * size
        self.num_waiting = size
        self.deposits: list[Tensor | None] = [None] * size
        self.results: list[Tensor] | None = None
        self.error: BaseException | None = None
        self.finished_s: float | None = None
        self.complete = threading.Event()
        self.lock = threading.Lock()


class _GroupState:
    """The state that the threads of one group share: collectives, numbered in call order."""

    def __init__(self, ranks: tuple[int, ...], timeout_s: float, failed: str | None) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.collectives: dict[int, _Collective] = {}
        self.has_common_memory = False
        self.common: dict[int, Tensor] = {}  # memory that all threads write to
        self.lock = threading.Lock()
        self.failed = failed

    def collective(self, number: int) -> _Collective:
        with self.lock:
            collective = self.collectives.setdefault(number, _Collective(len(self.ranks)))
            if self.failed is not None:
                collective.complete.set()
            return collective

    def leave(self, number: int) -> None:
        """Forget a collective when all members have its result."""
        with self.lock:
            self.collectives[number].num_waiting -= 1
            if self.collectives[number].num_waiting == 0:
                del self.collectives[number]

    def fail(self, reason: str) -> None:
        """Wake every waiter with an error."""
        with self.lock:
            self.failed = self.failed or reason
            for collective in self.collectives.values():
                collective.complete.set()


class _LocalHandle:
    """The handle of one member, which copies its result out of the collective."""

    def __init__(self, state: _GroupState, number: int, index: int, output: Tensor) -> None:
        self._state = state
        self._number = number
        self._index = index
        self._output = output
        self._waited = False
        self.started_s = time.perf_counter()
        self.finished_s: float | None = None

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._waited or self._state.collective(self._number).complete.is_set()

    def wait(self) -> None:
        """Return when the result is in place."""
        if self._waited:
            return
        collective = self._state.collective(self._number)
        if not collective.complete.wait(self._state.timeout_s):
            raise PeerLost(self._missing(collective))
        if collective.error is not None:
            raise collective.error
        if collective.results is None:
            raise PeerLost(f"{self._missing(collective)}: {self._state.failed}")
        self._output.copy_(collective.results[self._index])
        self.finished_s = collective.finished_s
        self._waited = True
        self._state.leave(self._number)

    def _missing(self, collective: _Collective) -> str:
        absent = [
            rank
            for rank, label in zip(self._state.ranks, collective.labels, strict=True)
            if label is None
        ]
        label = collective.labels[self._index]
        return f"{label} of ranks {list(self._state.ranks)} lacks ranks {absent}"


class LocalGroup(BaseGroup):
    """One thread's view of a group of threads."""

    def __init__(self, state: _GroupState, index: int) -> None:
        """Join `state` as its member at position `index`."""
        super().__init__(state.ranks, state.ranks[index])
        self._state = state
        self._number = 0

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        return self._deposit(
            f"all_reduce({op})", tensor, tensor, lambda parts: [_combine(parts, op)] * self.size
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        return self._deposit(
            "all_gather",
            tensor,
            output,
            lambda parts: [torch.cat([part.reshape(-1) for part in parts])] * self.size,
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        return self._deposit(
            f"reduce_scatter({op})",
            tensor,
            output,
            lambda parts: list(_combine(parts, op).reshape(-1).chunk(self.size)),
        )

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        return self._deposit(
            f"broadcast({root})", tensor, tensor, lambda parts: [parts[root]] * self.size
        )

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`."""

        def combine(parts: list[Tensor]) -> list[Tensor]:
            total = torch.empty_like(parts[root])
            combine_by_tree(parts, root, total, op)
            return [total if at == root else part for at, part in enumerate(parts)]

        return self._deposit(f"reduce({op}, {root})", tensor, tensor, combine)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor that the first caller makes, or None without `has_common_memory`."""
        if not self._state.has_common_memory:
            return None
        number, self._number = self._number, self._number + 1
        with self._state.lock:
            return self._state.common.setdefault(number, torch.empty(num_elements, dtype=dtype))

    def barrier(self) -> None:
        """Return when every member has arrived."""
        nothing = torch.zeros(0)
        self._deposit("barrier", nothing, nothing, lambda parts: parts).wait()

    def _deposit(self, label: str, tensor: Tensor, output: Tensor, combine: Combine) -> Handle:
        number, self._number = self._number, self._number + 1
        collective = self._state.collective(number)
        with collective.lock:
            collective.labels[self.index] = label
            # A private copy: results must not alias the caller's tensor.
            collective.deposits[self.index] = tensor.detach().clone()
            parts = [part for part in collective.deposits if part is not None]
            if len(parts) == self.size:
                self._settle(collective, parts, combine)
        return _LocalHandle(self._state, number, self.index, output.detach().view(-1))

    def _settle(self, collective: _Collective, parts: list[Tensor], combine: Combine) -> None:
        labels = [str(label) for label in collective.labels]
        if len(set(labels)) > 1 or len({part.numel() for part in parts}) > 1:
            sizes = [part.numel() for part in parts]
            found = dict(zip(self.ranks, zip(labels, sizes, strict=True), strict=True))
            collective.error = ProtocolError(
                f"ranks called different collectives, or with different sizes: {found}"
            )
        else:
            collective.results = [result.reshape(-1) for result in combine(parts)]
        collective.finished_s = time.perf_counter()
        collective.complete.set()


def _combine(parts: list[Tensor], op: str) -> Tensor:
    total = torch.empty_like(parts[0])
    combine_in_order(parts, total, op)
    return total


class LocalHub:
    """The shared part of a world of threads: the state of each group of ranks."""

    def __init__(
        self,
        mesh: Mesh,
        timeout_s: float,
        faults: Faults | None = None,
        has_common_memory: bool = False,
    ) -> None:
        """Prepare for the ranks of `mesh`; `faults` apply to their messages."""
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._states: dict[tuple[tuple[str, ...], tuple[int, ...], int], _GroupState] = {}
        self._num_made: Counter[tuple[tuple[str, ...], int]] = Counter()
        self._lock = threading.Lock()
        self._failed: str | None = None
        self._mailboxes: dict[tuple[tuple[str, ...], int], LocalMailboxes] = {}
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
                # A group made after a failure must not wait for the failed rank.
                state = self._states.setdefault(
                    (axes, ranks, number), _GroupState(ranks, self._timeout_s, self._failed)
                )
                state.has_common_memory = self._has_common_memory
            return LocalGroup(state, ranks.index(rank))

        def transport_along(axes: tuple[str, ...], trace: Recorder | None) -> Transport:
            with self._lock:
                number = self._num_opened[axes, rank]
                self._num_opened[axes, rank] += 1
                mailboxes = self._mailboxes.setdefault(
                    (axes, number), LocalMailboxes(self._mesh.num_ranks, self._faults)
                )
            return mailboxes.transport(rank, trace, self._mesh.group_of(rank, axes))

        return World(rank, self._mesh, group_along, transport_along, carrier="local")

    def fail(self, rank: int, reason: str) -> None:
        """Wake all threads that wait now or later with an error."""
        with self._lock:
            self._failed = self._failed or reason
            states = list(self._states.values())
            mailboxes = list(self._mailboxes.values())
        for state in states:
            state.fail(reason)
        for opened in mailboxes:
            opened.lose(rank, reason)


def run_threads(
    mesh: Mesh,
    body: Callable[[World], Result],
    *,
    timeout_s: float = 60.0,
    faults: Faults | None = None,
    has_common_memory: bool = False,
) -> list[Result]:
    """Run `body` once per rank of `mesh`, each in a thread; return the results by rank.

    With `has_common_memory` `allocate_common` returns memory, as between processes of one host.
    Raise the first error that is not a consequence of another rank's failure.
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
