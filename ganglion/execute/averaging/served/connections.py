"""One connection for each worker: how workers find a served centre, come, and are let go.

The centre listens at a place it writes into a store; a worker looks it up and calls. Each call
becomes a transport of two ranks, so one dead worker breaks its own connection and no other:

    worker 0 ==transport==.
    worker 1 ==transport===> Door.events(): who said what, and who is gone
    a new worker --call---'

Workers of the same host come through a Unix socket and shared memory; with `listen_on`, all come
over TCP. A caller that does not know the token of the store's entry is hung up on.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import sys
import time
from datetime import timedelta
from typing import NamedTuple, Protocol

from torch import Tensor

from ganglion.errors import CommError, ConfigError, PeerLost
from ganglion.execute.comm import Arrival, this_host
from ganglion.execute.comm.shm import INLINE_BYTES, ShmTransport

_TOKEN_BYTES = 16
_SERVER = -1  # its rank in every transport: no worker has it
_RETRY_S = 0.05


class Store(Protocol):
    """What is needed of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are there, or raise RuntimeError."""


class Said(NamedTuple):
    """A message that came in whole."""

    caller: int
    arrival: Arrival


class Gone(NamedTuple):
    """A connection that ended; the reason says how that showed."""

    caller: int
    reason: str


class _Line(NamedTuple):
    connection: socket.socket
    descriptor: int
    transport: ShmTransport


class Door:
    """The centre's end of all connections; callers are numbered as they come."""

    def __init__(self, listen_on: str | None = None) -> None:
        """Listen on this host only, or at the address `listen_on` for workers of all hosts."""
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener, place = _listen(listen_on)
        self.address = f"{place} {self._token.hex()}"
        self._is_near = listen_on is None
        self._lines: dict[int, _Line] = {}
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}  # not greeted yet
        self._callers: dict[int, int] = {}  # by descriptor
        self._events: list[Said | Gone] = []
        self._num_callers = 0
        self._poll = select.poll()
        self._poll.register(self._listener.fileno(), select.POLLIN)

    def events(self, timeout_s: float) -> list[Said | Gone]:
        """Return what happened, after waiting for it at most so long."""
        wait_s = 0.0 if self._events else max(0.0, timeout_s)
        for descriptor, _ in self._poll.poll(wait_s * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._strangers:
                self._greet(descriptor)
            elif descriptor in self._callers:  # else it was hung up on a moment ago
                self._listen_to(self._callers[descriptor])
        found, self._events = self._events, []
        # A worker that was started again calls anew: the end of its first life comes before that.
        return sorted(found, key=lambda event: event.caller)

    def say(self, caller: int, kind: str, data: Tensor, *, step: int, version: int) -> None:
        """Send to a caller and never wait; one that is gone shows in the events."""
        line = self._lines.get(caller)
        if line is None:
            return
        try:
            line.transport.post(caller, kind, data, step=step, version=version)
        except PeerLost:
            self._lose(caller, "it was gone before it was answered")
        else:
            self._watch(caller)

    def hang_up(self, caller: int, *, at_once: bool = False) -> None:
        """End a connection; it shows in no event.

        What was said is handed over first, for up to a second, unless it must end `at_once`.
        """
        line = self._lines.pop(caller, None)
        if line is None:
            return
        del self._callers[line.descriptor]
        self._poll.unregister(line.descriptor)
        if at_once and line.connection.fileno() >= 0:
            with contextlib.suppress(OSError):  # it is gone already
                line.connection.shutdown(socket.SHUT_RDWR)
        line.transport.close()

    def close(self) -> None:
        """Hang up on everybody and stop listening."""
        self._listener.close()
        for stranger, _ in self._strangers.values():
            stranger.close()
        for caller in tuple(self._lines):
            self.hang_up(caller)

    # --- parts ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller gave up meanwhile
        if not self._is_near:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._strangers[connection.fileno()] = (connection, bytearray())
        self._poll.register(connection.fileno(), select.POLLIN)

    def _greet(self, descriptor: int) -> None:
        """Read more of the token; a silent caller delays nobody."""
        connection, heard = self._strangers[descriptor]
        try:
            more = connection.recv(_TOKEN_BYTES - len(heard), socket.MSG_DONTWAIT)
        except OSError:
            more = b""
        heard += more
        if more and len(heard) < _TOKEN_BYTES:
            return
        del self._strangers[descriptor]
        if secrets.compare_digest(bytes(heard), self._token):
            self._admit(connection)
        else:
            self._poll.unregister(descriptor)
            connection.close()

    def _admit(self, connection: socket.socket) -> None:
        caller = self._num_callers
        self._num_callers += 1
        transport = _transport(_SERVER, caller, connection, self._is_near)
        self._lines[caller] = _Line(connection, connection.fileno(), transport)
        self._callers[connection.fileno()] = caller

    def _listen_to(self, caller: int) -> None:
        line = self._lines[caller]
        try:
            while (arrival := line.transport.poll()) is not None:
                self._events.append(Said(caller, arrival))
        except PeerLost:  # its text names ranks of this one connection, which nobody knows
            self._lose(caller, "its connection broke: look for the first error in its log")
        except CommError as error:
            self._lose(caller, str(error))
        else:
            self._watch(caller)

    def _watch(self, caller: int) -> None:
        """Be woken when the caller takes more, if something waits for that."""
        line = self._lines[caller]
        events = select.POLLIN
        try:
            line.transport.flush(0.0)
        except PeerLost:
            events |= select.POLLOUT
        if line.connection.fileno() < 0:  # the transport let go of it
            self._lose(caller, "it closed the connection")
        else:
            self._poll.modify(line.descriptor, events)

    def _lose(self, caller: int, reason: str) -> None:
        self.hang_up(caller)
        self._events.append(Gone(caller, reason))


class Phone:
    """A worker's way to one shard of a centre, which it may have to call again."""

    def __init__(self, store: Store, run_id: str, worker: int, shard: int = 0) -> None:
        """Know where the address is to be found."""
        self._store = store
        self._key = place_of(run_id, shard)
        self._worker = worker
        self._shard = shard
        self._line: ShmTransport | None = None

    def call(self, timeout_s: float) -> None:
        """Connect; a centre that does not answer is called again until the time is over."""
        self.hang_up()
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                remaining_s = max(0.001, end_s - time.monotonic())
                self._store.wait([self._key], timedelta(seconds=remaining_s))
                address = self._store.get(self._key).decode("ascii")
                connection, is_near = _dial(address, remaining_s)
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() >= end_s:
                    raise PeerLost(
                        f"worker {self._worker} could not reach the centre, shard {self._shard}, "
                        f"within {timeout_s:g} s ({error}): look for the first error in its log"
                    ) from error
                time.sleep(_RETRY_S)
        self._line = _transport(self._worker, _SERVER, connection, is_near)

    def say(self, kind: str, data: Tensor, *, step: int = -1, version: int = -1) -> None:
        """Send without waiting; PeerLost if the centre is gone."""
        if self._line is None:
            raise PeerLost(f"worker {self._worker} has no connection to the centre: call first")
        self._line.post(_SERVER, kind, data, step=step, version=version)

    def hear(self, timeout_s: float, awaiting: str) -> Tensor:
        """Return the next message of the centre."""
        if self._line is None:
            raise PeerLost(f"worker {self._worker} has no connection to the centre: call first")
        return self._line.receive(timeout_s, awaiting).tensor

    def flush(self, timeout_s: float) -> None:
        """Return when all that was said is on its way."""
        if self._line is not None:
            self._line.flush(timeout_s)

    def hang_up(self) -> None:
        """End the connection."""
        if self._line is not None:
            self._line.close()
        self._line = None


def place_of(run_id: str, shard: int) -> str:
    """Return under which key of the store a shard's address stands."""
    return f"ganglion/{run_id}/center/{shard}"


def _transport(rank: int, peer: int, connection: socket.socket, is_near: bool) -> ShmTransport:
    """Carry messages over a connected socket; far ends share no memory, all goes through it."""
    inline_bytes = INLINE_BYTES if is_near else sys.maxsize
    return ShmTransport(rank, {peer: connection}, inline_bytes=inline_bytes)


def _listen(listen_on: str | None) -> tuple[socket.socket, str]:
    if listen_on is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"ganglion-{secrets.token_hex(16)}"
        listener.bind("\0" + name)
        place = f"unix {this_host()} {name}"
    else:
        try:
            listener = socket.create_server((listen_on, 0))
        except OSError as error:
            raise ConfigError(
                f"listen_on = {listen_on!r} cannot be listened at ({error}): give an address of "
                f"this host that the workers can reach"
            ) from error
        place = f"tcp {listen_on} {listener.getsockname()[1]}"
    listener.listen(128)
    listener.setblocking(False)
    return listener, place


def _dial(address: str, timeout_s: float) -> tuple[socket.socket, bool]:
    """Return a connected socket that has greeted, and whether the other end is on this host."""
    way, place, name, token = address.split()
    if way == "unix" and place != this_host():
        raise ConfigError(
            "the centre listens on another host, and only there: start its server with "
            "listen_on = an address of that host"
        )
    family = socket.AF_UNIX if way == "unix" else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        if way == "unix":
            connection.connect("\0" + name)
        else:
            connection.connect((place, int(name)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes.fromhex(token))
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection, way == "unix"
