"""The sockets of a group: reading all members together, and sending without waiting for a peer.

A blocked wait sleeps in poll(), without the GIL, and sees a killed peer at once, as end of file or
as a reset. A member that closes its group sends a goodbye first, so that leaving early after the
last collective is not taken for a death.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from ganglion.errors import CommError, PeerLost
from ganglion.execute.comm.calls import SIGNAL, Inbox

_READ_BYTES = 96 << 10  # one small collective, and no more than malloc keeps at hand
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(8 * array.array("i").itemsize)
_QUIET_S = 0.2  # a wait this long may be a disagreement


class MemberLink:
    """The connection to one other member."""

    def __init__(
        self, peer: int, index: int, connection: socket.socket, takes_descriptors: bool
    ) -> None:
        """Own `connection` to rank `peer`, the member at position `index`."""
        connection.setblocking(False)
        self.peer = peer
        self.index = index
        self.socket = connection
        self.inbox = Inbox(peer)
        self.has_ended = False
        self._takes_descriptors = takes_descriptors

    def send(self, record: bytes, descriptor: int = -1) -> None:
        """Send a small record; a broken connection is reported by the reading side."""
        try:
            if descriptor < 0:
                self.socket.send(record)
            else:
                socket.send_fds(self.socket, [record], [descriptor])
        except BlockingIOError:
            # Members signal in lock step, so only a member that stopped reading gets here.
            raise PeerLost(f"rank {self.peer} does not read its signals") from None
        except (BrokenPipeError, ConnectionResetError):
            return

    def read(self) -> None:
        """Read and parse arrived data, if any."""
        try:
            data = self._receive()
        except BlockingIOError:
            return
        except OSError:  # a reset: the peer died before it read all we had sent
            data = b""
        if data:
            self.inbox.feed(data)
        else:
            self.has_ended = True

    def _receive(self) -> bytes:
        if not self._takes_descriptors:
            return self.socket.recv(_READ_BYTES)
        data, extras, _, _ = self.socket.recvmsg(
            _READ_BYTES, _DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC
        )
        for _, _, packed in extras:
            self.inbox.descriptors.extend(array.array("i", packed))
        return data

    def close(self) -> None:
        """Close the connection."""
        self.inbox.close()
        self.socket.close()


class GroupLinks:
    """The connections of one member to all others, in order of rank."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        sockets: Mapping[int, socket.socket],
        timeout_s: float,
        *,
        takes_descriptors: bool,
        linger_s: float = 0.0,
    ) -> None:
        """Own `sockets`, by rank; a wait that lasts `timeout_s` fails.

        Before it sleeps, a wait polls for `linger_s` and yields the core between polls: an idle
        core is slow to wake.
        """
        self._linger_s = linger_s
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._links = [
            MemberLink(peer, ranks.index(peer), sockets[peer], takes_descriptors)
            for peer in sorted(sockets)
        ]
        self._by_descriptor = {link.socket.fileno(): link for link in self._links}
        self._broken: list[MemberLink] = []
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def __iter__(self) -> Iterator[MemberLink]:
        return iter(self._links)

    def synchronize(self, what: object) -> None:
        """Signal all others and return when all of them have signalled."""
        for link in self._links:
            link.send(SIGNAL)
        self.wait(lambda link: link.inbox.num_signals > 0, what)
        for link in self._links:
            link.inbox.num_signals -= 1

    def wait(
        self,
        heard: Callable[[MemberLink], bool],
        what: object,
        on_delay: Callable[[], None] | None = None,
    ) -> None:
        """Read until `heard` holds for all links; call `on_delay` once if that takes long.

        Raise PeerLost, or the failure that a peer sent, naming `what` is awaited.
        """
        if all(map(heard, self._links)):
            return
        start_s, waited_s = time.monotonic(), 0.0
        limit_s = self._timeout_s if on_delay is None else min(_QUIET_S, self._timeout_s)
        while True:
            self.read(limit_s - waited_s)
            if all(map(heard, self._links)):
                return
            lacking = [link for link in self._links if not heard(link)]
            self._raise_if_broken(lacking, what)
            waited_s = time.monotonic() - start_s
            if waited_s >= self._timeout_s:
                raise PeerLost(
                    f"{what} of ranks {list(self._ranks)} waited {self._timeout_s:g} s for ranks "
                    f"{[link.peer for link in lacking]}, which stayed silent: look at their logs, "
                    f"or raise train.timeout_s if they are only slow"
                )
            if on_delay is not None and waited_s >= limit_s:
                on_delay()
                on_delay, limit_s = None, self._timeout_s

    def read(self, wait_s: float) -> None:
        """Wait for data, at most `wait_s`, and read all there is."""
        end_s = time.monotonic() + min(wait_s, self._linger_s)
        while not (ready := self._poll.poll(0)) and time.monotonic() < end_s:
            os.sched_yield()
        for descriptor, _ in ready or self._poll.poll(wait_s * 1000):
            link = self._by_descriptor[descriptor]
            link.read()
            if link.has_ended:
                self._poll.unregister(descriptor)
            if link.has_ended or link.inbox.failure:
                self._broken.append(link)

    def _raise_if_broken(self, lacking: list[MemberLink], what: object) -> None:
        """Raise if a member failed, died, or left while something is still awaited from it."""
        for link in self._broken:
            if link.inbox.failure is not None:
                raise link.inbox.failure
        for link in self._broken:
            if not link.inbox.said_goodbye:
                reason = "it died, or was stopped"
            elif link in lacking:
                reason = "it closed the group"
            else:
                continue
            raise PeerLost(
                f"{what} of ranks {list(self._ranks)} lost rank {link.peer}: {reason}; look for "
                f"the first error in the log of rank {link.peer}"
            )

    def send_last(self, record: bytes) -> None:
        """Send a last record to every member that still reads, and end all waits of this side."""
        for link in self._links:
            with contextlib.suppress(OSError, CommError):
                link.send(record)
        for link in self._links:
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all sockets."""
        for link in self._links:
            link.close()


class Outbox:
    """Sends through one non-blocking socket; a thread sends what the socket does not take.

    The thread lives only while there is a backlog. The caller must not send it later: it may be
    waiting in another group, for a peer that waits for this backlog.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Send through `connection`, which its owner closes."""
        self._socket = connection
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._thread: threading.Thread | None = None

    def post(self, record: bytes, data: bytes | memoryview = b"") -> None:
        """Send both, now or when the socket takes them; the caller may reuse `data` at once.

        A broken connection is reported by the reading side.
        """
        with self._lock:
            sent = 0 if self._backlog else self._try(record, data)
            if sent < len(record) + len(data):
                self._backlog.append(memoryview(b"".join((record, data)))[sent:])
                if self._thread is None:
                    self._thread = threading.Thread(target=self._drain, daemon=True)
                    self._thread.start()

    def close(self, linger_s: float) -> None:
        """Give a backlog `linger_s` to leave; then the caller closes the socket."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(linger_s)
        with self._lock:
            self._backlog.clear()
        if thread is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()

    def _try(self, *pieces: bytes | memoryview) -> int:
        try:
            return self._socket.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError:
            return sys.maxsize  # the peer is gone: as good as sent

    def _drain(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while True:
            with self._lock:
                self._send_backlog()
                if not self._backlog:
                    self._thread = None
                    return
            poll.poll()

    def _send_backlog(self) -> None:
        while self._backlog:
            piece = self._backlog[0]
            sent = self._try(piece)
            if sent < len(piece):
                self._backlog[0] = piece[sent:]
                return
            self._backlog.popleft()
