"""Messages between threads of one process, with trouble on demand: the transport of the tests.

    hub = LocalMail(4)
    transports = [hub.transport(rank) for rank in range(4)]          # one for each thread
    hub = LocalMail(4, Faults(seed=1, delay_s=0.01, reorder=True))   # late, and in any order

What a fault does is drawn from the seed and the message, so a failing case can be played again.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ganglion.comm.message import Arrival, Forms, Header, Numbers, flow_number, header_numbers
from ganglion.comm.transport import death, left, record, silence
from ganglion.errors import PeerLost, ProtocolError
from ganglion.trace import Recorder


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong on the way.

    Messages wait up to `delay_s`, which lets those of different sources overtake each other; with
    `reorder` those of one source do so too, against the contract. `drop` and `duplicate` are
    probabilities. A rank dies at its post number `fail_after` (rank, posts): its transport raises
    PeerLost from then on, and so do those of its peers once they have what it sent before.
    """

    seed: int = 0
    delay_s: float = 0.0
    reorder: bool = False
    drop: float = 0.0
    duplicate: float = 0.0
    fail_after: tuple[int, int] | None = None


class LocalMail:
    """What the transports of one world of threads share: a mailbox for each rank."""

    def __init__(self, num_ranks: int, faults: Faults | None = None) -> None:
        """Prepare mailboxes for ranks 0 to `num_ranks` - 1."""
        self.num_ranks = num_ranks
        self._faults = Faults() if faults is None else faults
        self._boxes = [_Mailbox() for _ in range(num_ranks)]

    def transport(self, rank: int, trace: Recorder | None = None) -> LocalTransport:
        """Return the transport of one rank, for one thread."""
        return LocalTransport(rank, self._boxes, self._faults, trace)

    def lose(self, rank: int, reason: str) -> None:
        """Let all transports know that a rank is gone."""
        for box in self._boxes:
            box.lose(rank, reason)


class _Mailbox:
    """Messages for one rank, ordered by the time they are due."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Arrival]] = []
        self._num_put = 0
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        self._departed: set[int] = set()
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

    def see_off(self, source: int) -> None:
        with self._changed:
            self._departed.add(source)
            self._changed.notify()

    def take(self, rank: int, peers: Iterable[int], timeout_s: float, awaiting: str) -> Arrival:
        """Wait for the next message that is due; then for a loss, then for the deadline."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now_s = time.monotonic()
                if self._due and self._due[0][0] <= now_s:
                    return heapq.heappop(self._due)[2]
                self._raise_if_alone(rank, set(peers), f"awaited {awaiting}")
                next_s = min(end_s, self._due[0][0] if self._due else end_s)
                if now_s >= end_s:
                    raise silence(rank, set(peers) - self._departed, timeout_s, awaiting)
                self._changed.wait(next_s - now_s)

    def take_now(self, rank: int, timeout_s: float) -> Arrival | None:
        """Return the next message if one is due in time."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now_s = time.monotonic()
                if self._due and self._due[0][0] <= now_s:
                    return heapq.heappop(self._due)[2]
                if not self._due and self._lost:
                    raise self._loss(rank, "looked for messages")
                if now_s >= end_s:
                    return None
                next_s = min(end_s, self._due[0][0] if self._due else end_s)
                self._changed.wait(next_s - now_s)

    def _raise_if_alone(self, rank: int, peers: set[int], doing: str) -> None:
        if not self._due and self._lost:
            raise self._loss(rank, doing)
        if not self._due and peers and peers <= self._departed:
            raise left(rank, peers, doing)

    def _loss(self, rank: int, doing: str) -> PeerLost:
        lost, reason = next(iter(self._lost.items()))
        return death(rank, lost, reason, doing)


class LocalTransport:
    """One thread's end of a LocalMail."""

    def __init__(
        self, rank: int, boxes: list[_Mailbox], faults: Faults, trace: Recorder | None
    ) -> None:
        """Join as `rank`; made by LocalMail."""
        self.rank = rank
        self.peers = tuple(other for other in range(len(boxes)) if other != rank)
        self._boxes = boxes
        self._faults = faults
        self._trace = trace
        self._forms = Forms()
        self._num_posted = 0
        self._last_due_s = [0.0] * len(boxes)
        self._random = random.Random(f"{faults.seed} {rank}")

    def post(
        self,
        target: int,
        kind: str,
        tensor: Tensor,
        *,
        step: int = -1,
        stage: int = -1,
        microbatch: int = -1,
        version: int = -1,
    ) -> None:
        """Put a copy of `tensor` into the target's mailbox; see Transport."""
        start_s = 0.0 if self._trace is None else self._trace.clock()
        self._forms.pack(kind, tensor.shape, tensor.dtype)  # refuse what a wire would refuse
        if not 0 <= target < len(self._boxes):
            raise ProtocolError(f"rank {self.rank} has no peer {target}, only {list(self.peers)}")
        self._num_posted += 1
        self._die_if_due()
        if self._boxes[target].closed:
            raise left(self.rank, [target], f"sent a message of kind {kind!r}")
        numbers = (step, stage, microbatch, version, flow_number(self.rank, self._num_posted))
        self._deliver(target, kind, tensor, numbers)
        if self._trace is not None and self._trace.enabled:
            record(self._trace, "send", kind, numbers, tensor.nbytes, start_s)

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        """Wait for the next arrival of any source; see Transport."""
        self._raise_if_dead(f"awaited {awaiting}")
        box = self._boxes[self.rank]
        return self._recorded(box.take(self.rank, self.peers, timeout_s, awaiting))

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival if one comes in time; see Transport."""
        self._raise_if_dead("looked for messages")
        arrival = self._boxes[self.rank].take_now(self.rank, timeout_s)
        return None if arrival is None else self._recorded(arrival)

    def flush(self, timeout_s: float) -> None:
        """Return at once: a post puts the message into the mailbox itself."""
        self._raise_if_dead("handed messages over")

    def close(self) -> None:
        """Leave in good order; see Transport."""
        self._boxes[self.rank].closed = True
        for peer in self.peers:
            self._boxes[peer].see_off(self.rank)

    def _deliver(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        draw, faults = self._random, self._faults
        dropped, copies = draw.random() < faults.drop, 1 + (draw.random() < faults.duplicate)
        for _ in range(0 if dropped else copies):
            due_s = time.monotonic() + draw.random() * faults.delay_s
            if not faults.reorder:
                due_s = self._last_due_s[target] = max(due_s, self._last_due_s[target])
            step, stage, microbatch, version, flow = numbers
            header = Header(
                kind, step, stage, microbatch, version, tensor.shape, tensor.dtype, flow
            )
            copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
            self._boxes[target].put(due_s, Arrival(self.rank, header, copy))

    def _recorded(self, arrival: Arrival) -> Arrival:
        if self._trace is not None and self._trace.enabled:
            header = arrival.header
            numbers = header_numbers(header)
            now_s = self._trace.clock()
            record(self._trace, "receive", header.kind, numbers, arrival.tensor.nbytes, now_s)
        return arrival

    def _die_if_due(self) -> None:
        if self._is_dead():
            for peer in self.peers:
                self._boxes[peer].lose(self.rank, "a fault was injected")
        self._raise_if_dead("sent a message")

    def _is_dead(self) -> bool:
        fail_after = self._faults.fail_after
        return (
            fail_after is not None
            and self.rank == fail_after[0]
            and self._num_posted > fail_after[1]
        )

    def _raise_if_dead(self, doing: str) -> None:
        if self._is_dead():
            raise death(self.rank, self.rank, "a fault was injected", doing)
