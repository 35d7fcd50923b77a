"""Small collectives: data go to the others at the start and are combined by a wait.

    start()   call and data leave through the sockets, without waiting for a peer
    wait()    the others' records are read; complete collectives are combined, in order of rank

No thread is needed. Records are numbered, so members may run ahead of each other and waits may
come in any order. Every call of the group takes a number, whichever path its data take: a member
that waits long for a large collective announces it here, so that a member that called a small one
under the same number sees the disagreement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ganglion.errors import CommError
from ganglion.execute.comm.calls import (
    GOODBYE,
    Call,
    PeerCall,
    check_agreement,
    pack_failure,
)
from ganglion.execute.comm.checked_group import GroupFailure
from ganglion.execute.comm.shm.group_links import GroupLinks, MemberLink, Outbox

Finish = Callable[[Mapping[int, PeerCall]], None]
_LINGER_S = 1.0


class EagerHandle:
    """A started small collective."""

    def __init__(self, path: EagerPath, call: Call, finish: Finish) -> None:
        self._path = path
        self.call = call
        self.finish = finish
        self.peer_calls: dict[int, PeerCall] = {}
        self.started_s = time.perf_counter()
        self.settled_s: float | None = None

    @property
    def finished_s(self) -> float | None:
        """The time when the result was in place; looks for arrivals, without waiting."""
        if self.settled_s is None:
            self._path.settle_arrived()
        return self.settled_s

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self.finished_s is not None or self._path.has_failed

    def wait(self) -> None:
        """Return when the result is in place; raise CommError if it will never be."""
        if self.settled_s is None:
            self._path.wait(self)


class EagerPath:
    """The small collectives of one group, and the numbers of all its calls."""

    def __init__(self, ranks: tuple[int, ...], links: GroupLinks, failure: GroupFailure) -> None:
        """Exchange records through `links`; an error fails the group through `failure`."""
        self._ranks = ranks
        self._links = links
        self._outboxes = {link.index: Outbox(link.socket) for link in links}
        self._lock = threading.RLock()
        self.next_number = 0
        self._pending: dict[int, EagerHandle] = {}
        self._early: dict[int, list[tuple[int, PeerCall]]] = {}
        self._failure = failure
        failure.on_failure(lambda error: self._post(pack_failure(error)))

    @property
    def has_failed(self) -> bool:
        """Whether the group has failed or is closed."""
        return self._failure.error() is not None

    def start(self, call: Call, pieces: Sequence[bytes], finish: Finish) -> EagerHandle:
        """Send `pieces[i]` to member i; `finish` gets the calls of the others by member."""
        handle = EagerHandle(self, call, finish)
        record, num_bytes = b"", -1
        for index, outbox in self._outboxes.items():
            piece = pieces[index]
            if len(piece) != num_bytes:
                num_bytes = len(piece)
                record = call.pack(num_bytes)
            outbox.post(record, piece)
        with self._lock:
            self.next_number += 1
            self._pending[call.number] = handle
            if call.number in self._early:
                for early in self._early.pop(call.number):
                    self._file(*early)
        return handle

    def skip(self, call: Call) -> None:
        """Count a call that takes the other path."""
        with self._lock:
            self.next_number += 1
            self._early.pop(call.number, None)

    def announce(self, call: Call) -> None:
        """Announce a call that takes the other path and makes no progress."""
        self._post(call.pack())

    def wait(self, handle: EagerHandle) -> None:
        """Return when the result of `handle` is in place."""
        self._failure.check()

        def heard(link: MemberLink) -> bool:
            if link.inbox.calls:
                self._file_arrivals()
            return handle.settled_s is not None or link.index in handle.peer_calls

        try:
            with self._lock:
                self._links.wait(heard, handle.call)
        except CommError as error:
            raise self._failure.fail(error) from error

    def settle_arrived(self) -> None:
        """Finish collectives whose data have arrived; the next wait raises a failure."""
        if self._lock.acquire(blocking=False):
            try:
                self._links.read(0)
                self._file_arrivals()
            except CommError as error:
                self._failure.fail(error)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Send the backlog and a goodbye, then close the sockets."""
        self._post(GOODBYE)
        for outbox in self._outboxes.values():
            outbox.close(_LINGER_S)
        self._links.close()
        self._pending.clear()
        self._early.clear()

    def _post(self, record: bytes) -> None:
        for outbox in self._outboxes.values():
            outbox.post(record)

    def _file_arrivals(self) -> None:
        """File all arrivals under their numbers and finish complete collectives."""
        for link in self._links:
            while link.inbox.calls:
                self._file(link.index, link.inbox.calls.popleft())

    def _file(self, index: int, peer_call: PeerCall) -> None:
        handle = self._pending.get(peer_call.number)
        if handle is not None:
            handle.peer_calls[index] = peer_call
            if len(handle.peer_calls) == len(self._outboxes):
                del self._pending[handle.call.number]
                check_agreement(self._ranks, handle.call, handle.peer_calls)
                handle.finish(handle.peer_calls)
                handle.settled_s = time.perf_counter()
                handle.peer_calls.clear()
        elif peer_call.number >= self.next_number:
            self._early.setdefault(peer_call.number, []).append((index, peer_call))
        # Any other announces a large collective that this member has started as well.
