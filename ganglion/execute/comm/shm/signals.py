"""Sockets to all other members, read together: a wait ends with news, a death or a deadline.

A blocked wait sleeps in poll(), without the GIL, and hears of a killed peer at once, as end of
file or as a reset. A member that closes its group says goodbye first, so that leaving early after
the last collective is not taken for a death.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from ganglion.errors import CommError, PeerLost
from ganglion.execute.comm.calls import GOODBYE, SIGNAL, Inbox

_READ_BYTES = 96 << 10  # one small collective, and no more than malloc keeps at hand
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(8 * array.array("i").itemsize)
_QUIET_S = 0.2  # a wait this long may be a disagreement: time to ask around


class Link:
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
        self.hung_up = False
        self._takes_descriptors = takes_descriptors

    def send(self, record: bytes, descriptor: int = -1) -> None:
        """Send a small record; a broken connection is left to the reading side to explain."""
        try:
            if descriptor < 0:
                self.socket.send(record)
            else:
                socket.send_fds(self.socket, [record], [descriptor])
        except BlockingIOError:
            # Members signal in lock step: only one that stopped reading lets signals pile up.
            raise PeerLost(f"rank {self.peer} does not read its signals") from None
        except (BrokenPipeError, ConnectionResetError):
            return

    def read(self) -> None:
        """Take in what has arrived, if anything."""
        try:
            data = self._receive()
        except BlockingIOError:
            return
        except OSError:  # a reset: the peer died before it read all we had sent
            data = b""
        if data:
            self.inbox.feed(data)
        else:
            self.hung_up = True

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
        """Hang up."""
        self.inbox.close()
        self.socket.close()


class Links:
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

        Before it goes to sleep, a wait looks for news for `linger_s`, giving way to anybody who
        wants the core: an idle core is slow to wake.
        """
        self._linger_s = linger_s
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._links = [
            Link(peer, ranks.index(peer), sockets[peer], takes_descriptors)
            for peer in sorted(sockets)
        ]
        self._by_descriptor = {link.socket.fileno(): link for link in self._links}
        self._broken: list[Link] = []
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links)

    def synchronize(self, what: object) -> None:
        """Signal all others and return when all of them have signalled."""
        for link in self._links:
            link.send(SIGNAL)
        self.wait(lambda link: link.inbox.num_signals > 0, what)
        for link in self._links:
            link.inbox.num_signals -= 1

    def wait(
        self, heard: Callable[[Link], bool], what: object, ask: Callable[[], None] | None = None
    ) -> None:
        """Read until `heard` holds for all links; `ask` is called once if that takes long.

        Raises PeerLost or what a peer gave as its reason to fail, naming `what` is awaited.
        """
        if all(map(heard, self._links)):
            return
        start_s, waited_s = time.monotonic(), 0.0
        limit_s = self._timeout_s if ask is None else min(_QUIET_S, self._timeout_s)
        while True:
            self.read(limit_s - waited_s)
            if all(map(heard, self._links)):
                return
            lacking = [link for link in self._links if not heard(link)]
            self._explain(lacking, what)
            waited_s = time.monotonic() - start_s
            if waited_s >= self._timeout_s:
                raise self._silent(lacking, what)
            if ask is not None and waited_s >= limit_s:
                ask()
                ask, limit_s = None, self._timeout_s

    def read(self, wait_s: float) -> None:
        """Wait for news, but no longer than `wait_s`, and take in all there is."""
        for descriptor, _ in self._ready(wait_s):
            link = self._by_descriptor[descriptor]
            link.read()
            if link.hung_up:
                self._poll.unregister(descriptor)
            if link.hung_up or link.inbox.failure:
                self._broken.append(link)

    def _ready(self, wait_s: float) -> list[tuple[int, int]]:
        end_s = time.monotonic() + min(wait_s, self._linger_s)
        while not (ready := self._poll.poll(0)) and time.monotonic() < end_s:
            os.sched_yield()
        return ready or self._poll.poll(wait_s * 1000)

    def _explain(self, lacking: list[Link], what: object) -> None:
        """Raise if a member failed, died, or left although something is still awaited from it."""
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

    def _silent(self, lacking: list[Link], what: object) -> PeerLost:
        return PeerLost(
            f"{what} of ranks {list(self._ranks)} waited {self._timeout_s:g} s for ranks "
            f"{[link.peer for link in lacking]}, which stayed silent: look at their logs, or "
            f"raise train.timeout_s if they are only slow"
        )

    def tell(self, record: bytes) -> None:
        """Send a last record to everybody who still listens, and hang up."""
        for link in self._links:
            with contextlib.suppress(OSError, CommError):
                link.send(record)
        self.hang_up()

    def hang_up(self) -> None:
        """End all waits of this side; what was sent can still be read by the others."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)

    def say_goodbye(self) -> None:
        """Tell everybody that this member closes the group."""
        self.tell(GOODBYE)

    def close(self) -> None:
        """Close all sockets."""
        for link in self._links:
            link.close()
