"""Messages between ranks of one host: headers over Unix sockets, payloads in shared memory.

The thread that receives polls its sockets itself. No other thread has to be woken, which on a
shared core costs more than the message, and a killed peer shows at once as the end of its stream:

    sender                                          receiver
    copy tensor into a free slot  --header-->       wakes; the tensor *is* the slot
    slot is free again            <--one byte in shared memory-- the tensor is dropped
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from ganglion.errors import CommError, ProtocolError
from ganglion.execute.comm.message import Arrival, Numbers, local_arrival, plain_copy
from ganglion.execute.comm.shm.memory import MakeSegment, SlotSegment
from ganglion.execute.comm.shm.message_link import Broken, MessageLink
from ganglion.execute.comm.shm.unix_mesh import GatherTexts, connect_mesh
from ganglion.execute.comm.transport import Transport, departure_error, timeout_error
from ganglion.trace import Recorder

INLINE_BYTES = 16 << 10
_CLOSE_S = 1.0
_LINGER_S = 100e-6


def open_shm_transport(
    rank: int,
    ranks: Sequence[int],
    gather_texts: GatherTexts,
    timeout_s: float,
    trace: Recorder | None = None,
) -> ShmTransport:
    """Connect to the other members of `ranks`, all on this host; return the transport."""
    return ShmTransport(rank, connect_mesh(rank, ranks, gather_texts, timeout_s), trace)


class ShmTransport(Transport):
    """Carries messages between this rank and others of the same host."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        trace: Recorder | None = None,
        *,
        inline_bytes: int = INLINE_BYTES,
        make_segment: MakeSegment = SlotSegment,
    ) -> None:
        """Own one connected socket for each peer.

        Payloads of up to `inline_bytes` go through the socket, larger ones through memory that
        `make_segment` makes.
        """
        super().__init__(rank, connections, trace)
        self._arrivals: deque[Arrival] = deque()
        self._links: dict[int, MessageLink] = {}
        self._by_descriptor: dict[int, MessageLink] = {}
        self._backlog: set[int] = set()
        self._poll = select.poll()
        for peer, connection in connections.items():
            link = MessageLink(rank, peer, connection, self._arrivals, inline_bytes, make_segment)
            self._links[peer] = self._by_descriptor[link.descriptor] = link
            self._poll.register(link.descriptor, select.POLLIN)

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        """Wait for the next arrival of any source; see Transport."""
        if self._backlog:
            self._pump(0.0)
        if not self._arrivals:
            self._wait(timeout_s, awaiting)
        return self._arrivals.popleft()

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival if one comes in time; see Transport."""
        if self._backlog or not self._arrivals:
            self._pump(0.0 if self._arrivals else timeout_s)
        if self._arrivals:
            return self._arrivals.popleft()
        self._raise_if_broken("looked for messages")
        return None

    def flush(self, timeout_s: float) -> None:
        """Return when everything posted was handed over; see Transport."""
        end_s = time.monotonic() + timeout_s
        while self._backlog:
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0:
                raise timeout_error(self.rank, self._backlog, timeout_s, "room for what it posted")
            self._pump(remaining_s)
        self._raise_if_broken("handed messages over")

    def close(self) -> None:
        """Send a goodbye and release everything; see Transport."""
        end_s = time.monotonic() + _CLOSE_S
        for link in tuple(self._links.values()):
            try:
                link.send_bye()
            except Broken:
                self._drop(link)
            else:
                self._watch(link)
        while self._backlog and (remaining_s := end_s - time.monotonic()) > 0:
            self._pump(remaining_s)
        for link in tuple(self._links.values()):
            self._drop(link)

    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        link = self._links.get(target)
        if link is None:
            return self._carry_without_link(target, kind, tensor, numbers)
        try:
            link.send(kind, tensor, tensor.nbytes, numbers)
        except Broken as error:
            self._break(link, str(error))
            raise self._unsent(target, kind) from error
        if link.backlogged:
            self._watch(link)

    def _carry_without_link(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        """Deliver to this rank itself; any other rank without a link is an error."""
        if target != self.rank:
            raise self._unsent(target, kind)
        arrival = local_arrival(self.rank, kind, plain_copy(tensor), numbers)
        self._arrivals.append(self._recorded(arrival))

    def _wait(self, timeout_s: float, awaiting: str) -> None:
        """Return when there is an arrival."""
        end_s = time.monotonic() + timeout_s
        if self._links and not self._broken:
            self._serve(self._linger(end_s))
        while not self._arrivals:
            self._raise_if_broken(f"awaited {awaiting}")
            if not self._links:
                raise departure_error(self.rank, self._departed, f"awaited {awaiting}")
            if not self._pump(end_s - time.monotonic()) and time.monotonic() >= end_s:
                raise timeout_error(self.rank, self._links, timeout_s, awaiting)

    def _linger(self, end_s: float) -> list[tuple[int, int]]:
        """Poll for a moment before sleeping, yielding the core: an idle core is slow to wake."""
        end_s = min(end_s, time.monotonic() + _LINGER_S)
        while not (ready := self._poll.poll(0)) and time.monotonic() < end_s:
            os.sched_yield()
        return ready

    def _pump(self, timeout_s: float) -> bool:
        """Write and read once on all ready sockets; return whether any was ready in time."""
        ready = self._poll.poll(max(0.0, timeout_s) * 1000)
        if ready:
            self._serve(ready)
        return bool(ready)

    def _serve(self, ready: list[tuple[int, int]]) -> None:
        """Write and read on the ready sockets."""
        start_s = 0.0 if self._trace is None else self._trace.clock()
        num_known = len(self._arrivals)
        for descriptor, events in ready:
            link = self._by_descriptor[descriptor]
            try:
                if events & select.POLLOUT:
                    link.write_backlog()
                    self._watch(link)
                if events & ~select.POLLOUT:
                    link.read()
                if link.departed:
                    self._part_from(link)
            except Broken as error:
                self._break(link, str(error))
            except CommError as error:
                self._break(link, error)
        if self._trace is not None:
            for arrival in itertools.islice(self._arrivals, num_known, None):
                self._recorded(arrival, start_s)

    def _watch(self, link: MessageLink) -> None:
        """Poll for writing exactly while the link has a backlog."""
        if link.backlogged and link.peer not in self._backlog:
            self._backlog.add(link.peer)
            self._poll.modify(link.descriptor, select.POLLIN | select.POLLOUT)
        elif not link.backlogged and link.peer in self._backlog:
            self._backlog.remove(link.peer)
            self._poll.modify(link.descriptor, select.POLLIN)

    def _unsent(self, target: int, kind: str) -> CommError:
        doing = f"sent a message of kind {kind!r}"
        if target in self._broken:
            return self._loss(target, doing)
        if target in self._departed:
            return departure_error(self.rank, [target], doing)
        return ProtocolError(
            f"rank {self.rank} has no connection to rank {target}, only to {list(self.peers)}: "
            f"open the transport with all ranks that talk, and post before closing it"
        )

    def _break(self, link: MessageLink, reason: str | CommError) -> None:
        """Drop a broken connection, after reading what arrived before it broke."""
        if isinstance(reason, str):
            try:
                while not link.departed and link.read():
                    pass
            except Broken:
                pass
            except CommError as error:
                reason = error
        if link.departed:
            self._part_from(link)
        else:
            self._broken[link.peer] = reason
            self._drop(link)

    def _part_from(self, link: MessageLink) -> None:
        """Drop the connection to a peer that closed in good order."""
        if link.backlogged:
            self._broken[link.peer] = "it closed before it took all messages"
        self._departed.add(link.peer)
        self._drop(link)

    def _drop(self, link: MessageLink) -> None:
        self._poll.unregister(link.descriptor)
        self._backlog.discard(link.peer)
        del self._by_descriptor[link.descriptor], self._links[link.peer]
        link.close()
