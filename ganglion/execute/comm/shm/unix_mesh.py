"""Connecting the ranks of one host: a Unix stream socket between every two of them.

Every rank listens at an abstract address (it has no file, so a killed rank leaves nothing behind),
gives address and token to the others, connects to all lower ranks and accepts all higher ones:

    rank 2 --connect, greet--> rank 1 --connect, greet--> rank 0
        `------------------connect, greet-----------------^

Connections of another user, or without the token, are closed.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from ganglion.errors import PeerLost

GatherTexts = Callable[[str], Sequence[str]]

_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<I{_TOKEN_BYTES}s")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def connect_mesh(
    rank: int, ranks: Sequence[int], gather_texts: GatherTexts, timeout_s: float
) -> dict[int, socket.socket]:
    """Return a connected, blocking socket for each other member of `ranks`, all on this host.

    Every member calls this at the same time; `gather_texts(text)` returns the texts of all members,
    in any order, and is called once. Raise PeerLost that names the ranks that did not connect.
    """
    end_s = time.monotonic() + timeout_s
    token = secrets.token_bytes(_TOKEN_BYTES)
    builder = _MeshBuilder(rank, token)
    address = f"ganglion-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address)
        listener.listen(len(ranks))
        try:
            texts = gather_texts(f"{rank} {address} {token.hex()}")
            builder.connect(texts, ranks, end_s)
            builder.accept(listener, {other for other in ranks if other > rank}, end_s, timeout_s)
        except BaseException:
            _close_all(builder.connected)
            raise
        finally:
            _close_all(builder.unidentified)
    return builder.connected


class _MeshBuilder:
    """The sockets of one rank while the mesh is being made."""

    def __init__(self, rank: int, token: bytes) -> None:
        self._rank = rank
        self._token = token
        self.unidentified: dict[int, socket.socket] = {}  # by descriptor
        self.connected: dict[int, socket.socket] = {}  # by rank

    def connect(self, texts: Sequence[str], ranks: Sequence[int], end_s: float) -> None:
        for text in texts:
            other, address, token = text.split()
            if int(other) in ranks and int(other) < self._rank:
                greeting = _GREETING.pack(self._rank, bytes.fromhex(token))
                self.connected[int(other)] = _connect(int(other), address, greeting, end_s)

    def accept(
        self, listener: socket.socket, absent: set[int], end_s: float, timeout_s: float
    ) -> None:
        """Accept connections until all of `absent` have greeted; a silent one delays no other."""
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while absent:
            ready = poll.poll(max(0.0, end_s - time.monotonic()) * 1000)
            if not ready:
                raise PeerLost(
                    f"rank {self._rank} waited {timeout_s:g} s for ranks {sorted(absent)} of this "
                    f"host to connect: look for the first error in their logs"
                )
            for descriptor, _ in ready:
                if descriptor == listener.fileno():
                    caller, _ = listener.accept()
                    self.unidentified[caller.fileno()] = caller
                    poll.register(caller, select.POLLIN)
                else:
                    poll.unregister(descriptor)
                    absent.discard(self._admit(self.unidentified.pop(descriptor), absent))

    def _admit(self, caller: socket.socket, absent: set[int]) -> int:
        """Return the rank that greeted; close a connection without a valid greeting, return -1."""
        # A greeting is one small write, so a readable connection has all of it.
        greeting = caller.recv(_GREETING.size, socket.MSG_DONTWAIT)
        if len(greeting) == _GREETING.size and _same_user(caller):
            other, token = _GREETING.unpack(greeting)
            if other in absent and secrets.compare_digest(token, self._token):
                self.connected[other] = caller
                return int(other)
        caller.close()
        return -1


def _connect(other: int, address: str, greeting: bytes, end_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        connection.connect("\0" + address)
        if not _same_user(connection):
            raise PermissionError("another user listens there")
        connection.sendall(greeting)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise PeerLost(
            f"rank {other} cannot be reached through a Unix socket: it died, or it runs on another "
            f"host or in another container ({error})"
        ) from error
    return connection


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def _close_all(sockets: dict[int, socket.socket]) -> None:
    for connection in sockets.values():
        connection.close()
