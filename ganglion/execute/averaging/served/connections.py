"""One connection for each worker: how workers find a served centre, connect and disconnect.

The centre publishes its address in a store; a worker looks it up and connects. Each connection is a
transport of two ranks, so a dead worker breaks its own connection and no other:

    worker 0 ==transport==.
    worker 1 ==transport===> CenterListener.events(): messages received, clients lost
    a new worker ---------'

Workers of the same host connect through a Unix socket and shared memory; with `listen_on`, all use
TCP. A client that does not send the token of the store's entry is disconnected.
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
    """The part of a torch.distributed.Store that is needed."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value that is present."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are present, or raise RuntimeError."""


class Received(NamedTuple):
    """A whole message of a client."""

    client: int
    arrival: Arrival


class Lost(NamedTuple):
    """A connection that ended, and how that was noticed."""

    client: int
    reason: str


class _Connection(NamedTuple):
    socket: socket.socket
    descriptor: int
    transport: ShmTransport


class CenterListener:
    """The centre's end of all connections; clients are numbered in the order they connect."""

    def __init__(self, listen_on: str | None = None) -> None:
        """Listen on this host only, or at the address `listen_on` for workers of all hosts."""
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._socket, place = _listen(listen_on)
        self.address = f"{place} {self._token.hex()}"
        self._is_local = listen_on is None
        self._connections: dict[int, _Connection] = {}
        self._unverified: dict[int, tuple[socket.socket, bytearray]] = {}  # token not complete
        self._clients: dict[int, int] = {}  # by descriptor
        self._events: list[Received | Lost] = []
        self._num_clients = 0
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)

    def events(self, timeout_s: float) -> list[Received | Lost]:
        """Return the events since the last call; wait up to `timeout_s` for the first."""
        wait_s = 0.0 if self._events else max(0.0, timeout_s)
        for descriptor, _ in self._poll.poll(wait_s * 1000):
            if descriptor == self._socket.fileno():
                self._accept()
            elif descriptor in self._unverified:
                self._verify(descriptor)
            elif descriptor in self._clients:  # else it was disconnected in this loop
                self._receive(self._clients[descriptor])
        found, self._events = self._events, []
        # A restarted worker is a new client: the loss of its old connection must come first.
        return sorted(found, key=lambda event: event.client)

    def send(self, client: int, kind: str, data: Tensor, *, step: int, version: int) -> None:
        """Send without waiting; a client that is gone shows in the events."""
        connection = self._connections.get(client)
        if connection is None:
            return
        try:
            connection.transport.post(client, kind, data, step=step, version=version)
        except PeerLost:
            self._lose(client, "it was gone before it was answered")
        else:
            self._watch(client)

    def disconnect(self, client: int, *, at_once: bool = False) -> None:
        """End a connection without an event.

        Messages under way are delivered first, for up to a second, unless it must end `at_once`.
        """
        connection = self._connections.pop(client, None)
        if connection is None:
            return
        del self._clients[connection.descriptor]
        self._poll.unregister(connection.descriptor)
        if at_once and connection.socket.fileno() >= 0:
            with contextlib.suppress(OSError):  # it is gone already
                connection.socket.shutdown(socket.SHUT_RDWR)
        connection.transport.close()

    def close(self) -> None:
        """Disconnect all clients and stop listening."""
        self._socket.close()
        for unverified, _ in self._unverified.values():
            unverified.close()
        for client in tuple(self._connections):
            self.disconnect(client)

    # --- parts ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client gave up meanwhile
        if not self._is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unverified[connection.fileno()] = (connection, bytearray())
        self._poll.register(connection.fileno(), select.POLLIN)

    def _verify(self, descriptor: int) -> None:
        """Read more of the token without waiting for the rest."""
        connection, received = self._unverified[descriptor]
        try:
            more = connection.recv(_TOKEN_BYTES - len(received), socket.MSG_DONTWAIT)
        except OSError:
            more = b""
        received += more
        if more and len(received) < _TOKEN_BYTES:
            return
        del self._unverified[descriptor]
        if not secrets.compare_digest(bytes(received), self._token):
            self._poll.unregister(descriptor)
            connection.close()
            return
        client = self._num_clients
        self._num_clients += 1
        transport = _transport(_SERVER, client, connection, self._is_local)
        self._connections[client] = _Connection(connection, descriptor, transport)
        self._clients[descriptor] = client

    def _receive(self, client: int) -> None:
        transport = self._connections[client].transport
        try:
            while (arrival := transport.poll()) is not None:
                self._events.append(Received(client, arrival))
        except PeerLost:  # its text names ranks of this one connection, which no user knows
            self._lose(client, "its connection broke: look for the first error in its log")
        except CommError as error:
            self._lose(client, str(error))
        else:
            self._watch(client)

    def _watch(self, client: int) -> None:
        """Poll for room to send as well while messages to the client wait."""
        connection = self._connections[client]
        events = select.POLLIN
        try:
            connection.transport.flush(0.0)
        except PeerLost:
            events |= select.POLLOUT
        if connection.socket.fileno() < 0:  # the transport closed it
            self._lose(client, "it closed the connection")
        else:
            self._poll.modify(connection.descriptor, events)

    def _lose(self, client: int, reason: str) -> None:
        self.disconnect(client)
        self._events.append(Lost(client, reason))


class CenterClient:
    """A worker's connection to one shard of a centre, which can be made again."""

    def __init__(self, store: Store, run_id: str, worker: int, shard: int = 0) -> None:
        """Prepare to connect to the address that `store` holds."""
        self._store = store
        self._key = place_of(run_id, shard)
        self._worker = worker
        self._shard = shard
        self._transport: ShmTransport | None = None

    def connect(self, timeout_s: float) -> None:
        """Connect, with new attempts for `timeout_s`; raise PeerLost if none succeeds."""
        self.disconnect()
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                remaining_s = max(0.001, end_s - time.monotonic())
                self._store.wait([self._key], timedelta(seconds=remaining_s))
                address = self._store.get(self._key).decode("ascii")
                connection, is_local = _dial(address, remaining_s)
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() >= end_s:
                    raise PeerLost(
                        f"worker {self._worker} could not reach the centre, shard {self._shard}, "
                        f"within {timeout_s:g} s ({error}): look for the first error in its log"
                    ) from error
                time.sleep(_RETRY_S)
        self._transport = _transport(self._worker, _SERVER, connection, is_local)

    def send(self, kind: str, data: Tensor, *, step: int = -1, version: int = -1) -> None:
        """Send without waiting; raise PeerLost if the centre is gone."""
        self._connected().post(_SERVER, kind, data, step=step, version=version)

    def receive(self, timeout_s: float, awaiting: str) -> Tensor:
        """Return the next message of the centre."""
        return self._connected().receive(timeout_s, awaiting).tensor

    def flush(self, timeout_s: float) -> None:
        """Return when all messages are on their way."""
        if self._transport is not None:
            self._transport.flush(timeout_s)

    def disconnect(self) -> None:
        """End the connection, if there is one."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _connected(self) -> ShmTransport:
        if self._transport is None:
            raise PeerLost(f"worker {self._worker} has no connection to the centre: connect first")
        return self._transport


def place_of(run_id: str, shard: int) -> str:
    """Return the key of the store that holds a shard's address."""
    return f"ganglion/{run_id}/center/{shard}"


def _transport(rank: int, peer: int, connection: socket.socket, is_local: bool) -> ShmTransport:
    """Carry messages over a connected socket; other hosts share no memory with this one."""
    inline_bytes = INLINE_BYTES if is_local else sys.maxsize
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
    """Return a connected socket that has sent the token, and whether it stays on this host."""
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
