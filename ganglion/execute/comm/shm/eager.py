"""Small collectives: data go to the others at the start, and are combined when waited for.

    start()   call and data leave through the sockets, without waiting for anybody
    wait()    the others' records are read; whatever is complete is combined, in order of rank

No thread is needed and a started collective is on its way. Records are numbered, so members may
run ahead of each other and waits may come in any order. Every call of the group takes a number,
whichever path its data take: a member that waits long for a large collective announces it here,
and whoever called a small one under the same number knows that they disagree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ganglion.errors import CommError
from ganglion.execute.comm.calls import GOODBYE, Arrival, Call, check_agreement, pack_failure
from ganglion.execute.comm.fate import Fate
from ganglion.execute.comm.shm.outbox import Outbox
from ganglion.execute.comm.shm.signals import Link, Links

Finish = Callable[[Mapping[int, Arrival]], None]
_LINGER_S = 1.0


class EagerHandle:
    """A started small collective."""

    def __init__(self, path: EagerPath, call: Call, finish: Finish) -> None:
        """Wait through `path`; `finish` puts the result in place."""
        self._path = path
        self.call = call
        self.finish = finish
        self.arrivals: dict[int, Arrival] = {}
        self.started_s = time.perf_counter()
        self.settled_s: float | None = None

    @property
    def finished_s(self) -> float | None:
        """When the result was in place; looks for arrivals, without waiting."""
        if self.settled_s is None:
            self._path.glance()
        return self.settled_s

    def is_done(self) -> bool:
        """Say, without waiting, whether `wait` would return or raise at once."""
        return self.finished_s is not None or self._path.has_failed

    def wait(self) -> None:
        """Return when the result is in place; raise CommError if it will never be."""
        if self.settled_s is None:
            self._path.wait(self)


class EagerPath:
    """The small collectives of one group, and the numbers of all its calls."""

    def __init__(self, ranks: tuple[int, ...], links: Links, fate: Fate) -> None:
        """Exchange records through `links`; a failure decides the `fate` of the group."""
        self._ranks = ranks
        self._links = links
        self._outboxes = {link.index: Outbox(link.socket) for link in links}
        self._lock = threading.RLock()
        self.next_number = 0
        self._pending: dict[int, EagerHandle] = {}
        self._early: dict[int, list[tuple[int, Arrival]]] = {}
        self._fate = fate
        fate.on_failure(lambda error: self._post(pack_failure(error)))

    @property
    def has_failed(self) -> bool:
        """Whether the group has come to its end."""
        return self._fate.failure() is not None

    def start(self, call: Call, pieces: Sequence[bytes], finish: Finish) -> EagerHandle:
        """Send `pieces[i]` to member i; `finish` gets the arrivals by member."""
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
        """Count a call that is carried elsewhere."""
        with self._lock:
            self.next_number += 1
            self._early.pop(call.number, None)

    def announce(self, call: Call) -> None:
        """Tell the others about a call that is carried elsewhere and makes no progress."""
        self._post(call.pack())

    def wait(self, handle: EagerHandle) -> None:
        """Return when `handle` is settled."""
        self._fate.check()

        def heard(link: Link) -> bool:
            if link.inbox.calls:
                self._file_arrivals()
            return handle.settled_s is not None or link.index in handle.arrivals

        try:
            with self._lock:
                self._links.wait(heard, handle.call)
        except CommError as error:
            raise self._fate.fail(error) from error

    def glance(self) -> None:
        """Settle what has arrived; a failure is left to the next wait."""
        if self._lock.acquire(blocking=False):
            try:
                self._links.read(0)
                self._file_arrivals()
            except CommError as error:
                self._fate.fail(error)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Let what was posted leave, say goodbye and hang up."""
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
        """File all arrivals under their numbers, which settles what is complete."""
        for link in self._links:
            while link.inbox.calls:
                self._file(link.index, link.inbox.calls.popleft())

    def _file(self, index: int, arrival: Arrival) -> None:
        handle = self._pending.get(arrival.number)
        if handle is not None:
            handle.arrivals[index] = arrival
            if len(handle.arrivals) == len(self._outboxes):
                self._settle(handle)
        elif arrival.number >= self.next_number:
            self._early.setdefault(arrival.number, []).append((index, arrival))
        # Anything else announces a large collective that this member has started as well.

    def _settle(self, handle: EagerHandle) -> None:
        del self._pending[handle.call.number]
        check_agreement(self._ranks, handle.call, handle.arrivals)
        handle.finish(handle.arrivals)
        handle.settled_s = time.perf_counter()
        handle.arrivals.clear()
