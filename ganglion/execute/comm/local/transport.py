"""Messages between threads of one process, with injected faults: the transport of the tests.

    mailboxes = LocalMailboxes(4)
    transports = [mailboxes.transport(rank) for rank in range(4)]    # one for each thread
    LocalMailboxes(4, Faults(seed=1, delay_s=0.01, reorder=True))    # late, and in any order

Faults are drawn from the seed and the message, so a failing case can be repeated.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ganglion.errors import ProtocolError
from ganglion.execute.comm.message import Arrival, Forms, Numbers, local_arrival, plain_copy
from ganglion.execute.comm.transport import Transport, death_error, departure_error, timeout_error
from ganglion.trace import Recorder


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of a transport.

    Messages wait up to `delay_s`, so those of different sources may overtake each other; with
    `reorder` those of one source do so too, against the contract. `drop` and `duplicate` are
    probabilities. A rank dies at its post number `fail_after` (rank, posts): its transport raises
    PeerLost from then on, and those of its peers do after they have received its earlier messages.
    """

    seed: int = 0
    delay_s: float = 0.0
    reorder: bool = False
    drop: float = 0.0
    duplicate: float = 0.0
    fail_after: tuple[int, int] | None = None


class LocalMailboxes:
    """A mailbox for each rank, shared by the transports of one world of threads."""

    def __init__(self, num_ranks: int, faults: Faults | None = None) -> None:
        self.num_ranks = num_ranks
        self._faults = Faults() if faults is None else faults
        self._boxes = [_Mailbox() for _ in range(num_ranks)]

    def transport(
        self, rank: int, trace: Recorder | None = None, ranks: Iterable[int] | None = None
    ) -> LocalTransport:
        """Return the transport of one rank, for one thread; without `ranks`, to all others."""
        everyone = range(self.num_ranks) if ranks is None else ranks
        return LocalTransport(rank, {*everyone} - {rank}, self._boxes, self._faults, trace)

    def lose(self, rank: int, reason: str) -> None:
        """Mark a rank as lost in all mailboxes."""
        for box in self._boxes:
            box.lose(rank, reason)


class _Mailbox:
    """Messages for one rank, ordered by the time they are due."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Arrival]] = []
        self._num_put = 0
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        self.departed: set[int] = set()
        self.closed = False

    def put(self, due_s: float, arrival: Arrival) -> None:
        with self._changed:
            self._num_put += 1
            heapq.heappush(self._due, (due_s, self._num_put, arrival))
            self._changed.notify()

    def lose(self, source: int, reason: str) -> None:
        with self._changed:
            self._lost[source] = reason
            self._changed.notify()

    def depart(self, source: int) -> None:
        with self._changed:
            self.departed.add(source)
            self._changed.notify()

    def take(
        self, rank: int, peers: tuple[int, ...], timeout_s: float, doing: str
    ) -> Arrival | None:
        """Return the next message, or None if none is due in time; raise PeerLost after a loss."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now_s = time.monotonic()
                if self._due and self._due[0][0] <= now_s:
                    return heapq.heappop(self._due)[2]
                if not self._due:
                    for lost, reason in self._lost.items():
                        raise death_error(rank, lost, reason, doing)
                    if peers and self.departed.issuperset(peers):
                        raise departure_error(rank, peers, doing)
                if now_s >= end_s:
                    return None
                next_s = min(end_s, self._due[0][0] if self._due else end_s)
                self._changed.wait(next_s - now_s)


class LocalTransport(Transport):
    """The transport of one thread."""

    def __init__(
        self,
        rank: int,
        peers: Iterable[int],
        boxes: list[_Mailbox],
        faults: Faults,
        trace: Recorder | None,
    ) -> None:
        """Join as `rank`; made by LocalMailboxes."""
        super().__init__(rank, peers, trace)
        self._boxes = boxes
        self._faults = faults
        self._forms = Forms()
        self._last_due_s = [0.0] * len(boxes)
        self._random = random.Random(f"{faults.seed} {rank}")

    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        """Put a copy of `tensor` into the target's mailbox."""
        self._forms.pack(kind, tensor.shape, tensor.dtype)  # checks, as a wire would
        if target != self.rank and target not in self.peers:
            raise ProtocolError(f"rank {self.rank} has no peer {target}, only {list(self.peers)}")
        if self._is_dead():
            for peer in self.peers:
                self._boxes[peer].lose(self.rank, "a fault was injected")
        self._raise_if_dead("sent a message")
        if self._boxes[target].closed:
            raise departure_error(self.rank, [target], f"sent a message of kind {kind!r}")
        draw, faults = self._random, self._faults
        dropped, copies = draw.random() < faults.drop, 1 + (draw.random() < faults.duplicate)
        for _ in range(0 if dropped else copies):
            due_s = time.monotonic() + draw.random() * faults.delay_s
            if not faults.reorder:
                due_s = self._last_due_s[target] = max(due_s, self._last_due_s[target])
            arrival = local_arrival(self.rank, kind, plain_copy(tensor), numbers)
            self._boxes[target].put(due_s, arrival)

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        """Wait for the next arrival of any source; see Transport."""
        self._raise_if_dead(f"awaited {awaiting}")
        box = self._boxes[self.rank]
        arrival = box.take(self.rank, self.peers, timeout_s, f"awaited {awaiting}")
        if arrival is None:
            raise timeout_error(self.rank, {*self.peers} - box.departed, timeout_s, awaiting)
        return self._recorded(arrival)

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival if one comes in time; see Transport."""
        self._raise_if_dead("looked for messages")
        arrival = self._boxes[self.rank].take(self.rank, (), timeout_s, "looked for messages")
        return None if arrival is None else self._recorded(arrival)

    def flush(self, timeout_s: float) -> None:
        """Return at once: a post puts the message into the mailbox itself."""
        self._raise_if_dead("handed messages over")

    def close(self) -> None:
        """Leave in good order; see Transport."""
        self._boxes[self.rank].closed = True
        for peer in self.peers:
            self._boxes[peer].depart(self.rank)

    def _is_dead(self) -> bool:
        rank, num_posts = self._faults.fail_after or (-1, 0)
        return self.rank == rank and self._num_posted > num_posts

    def _raise_if_dead(self, doing: str) -> None:
        if self._is_dead():
            raise death_error(self.rank, self.rank, "a fault was injected", doing)
