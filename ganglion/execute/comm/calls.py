"""The records of collectives whose sums Ganglion takes itself.

Members of a shared-memory group send them through a Unix stream socket; MPI sends calls alone.

    call     the collective and its tensor, compared by all members; small data follow it
    signal   "my part of this slab is in shared memory": one byte
    failure  why this member gave up, so that the others stop waiting for it
    goodbye  this member closed the group; an end of stream without it is a death
    hello    first record: the size of this member's staging memory, with its descriptor

Records have a fixed layout and are never pickled.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm.collectives import MAX, SUM

KINDS = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "share")
OPS = ("", SUM, MAX)
# The wire carries positions: append new dtypes at the end.
DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)
_KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
_OP_CODES = {op: code for code, op in enumerate(OPS)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

SIGNAL, GOODBYE = b"S", b"B"
_CALL, _FAILURE, _HELLO = b"C", b"F", b"H"
# Number and bytes of data, then the fields that members must agree on, then the data's location.
_CALL_LAYOUT = struct.Struct("<cQQBBBIQiQQ")
_CALL_START = struct.Struct("<cQQ")
_AGREED = slice(_CALL_START.size, struct.calcsize("<cQQBBBIQ"))
_FAILURE_LAYOUT = struct.Struct("<cBH")
_HELLO_LAYOUT = struct.Struct("<c4sHIQ")
_MAGIC, _FORMAT = b"GNGC", 1
_MAX_TEXT = 4000
MAX_PAYLOAD = 1 << 20


class Call(NamedTuple):
    """One member's call of one collective; `segment` to `offset` locate its data."""

    number: int
    kind: str
    op: str
    dtype: torch.dtype
    root: int
    num_elements: int
    segment: int = -1
    segment_bytes: int = 0
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor it was called with."""
        return self.num_elements * self.dtype.itemsize

    def pack(self, payload_bytes: int = 0) -> bytes:
        """Return the record, to be followed by `payload_bytes` of data."""
        codes = _KIND_CODES[self.kind], _OP_CODES[self.op], _DTYPE_CODES[self.dtype]
        return _CALL_LAYOUT.pack(_CALL, self.number, payload_bytes, *codes, *self[4:])

    def __str__(self) -> str:
        options = [self.op] if self.op else []
        if self.kind in ("broadcast", "reduce"):
            options.append(f"root={self.root}")
        name = f"{self.kind}({', '.join(options)})" if options else self.kind
        if self.kind == "barrier":
            return name
        return f"{name} of {self.num_elements} {str(self.dtype).removeprefix('torch.')}"


class PeerCall(NamedTuple):
    """The call of a peer as it arrived; `call` parses the record."""

    number: int
    record: bytes
    payload: bytes

    def call(self) -> Call:
        """Return the parsed call; raise ProtocolError for unknown codes."""
        _, number, _, kind, op, dtype, *rest = _CALL_LAYOUT.unpack(self.record)
        if kind >= len(KINDS) or op >= len(OPS) or dtype >= len(DTYPES):
            raise ProtocolError(f"a call with unknown codes {(kind, op, dtype)} arrived")
        return Call(number, KINDS[kind], OPS[op], DTYPES[dtype], *rest)


def check_agreement(ranks: tuple[int, ...], mine: Call, others: Mapping[int, PeerCall]) -> None:
    """Raise ProtocolError that names each rank's call unless all called the same.

    `others` are the calls of the other members, by position.
    """
    agreed = mine.pack()[_AGREED]
    if all(other.record[_AGREED] == agreed for other in others.values()):
        return
    calls = {index: other.call() for index, other in others.items()}
    called = {rank: str(calls.get(index, mine)) for index, rank in enumerate(ranks)}
    raise ProtocolError(
        f"ranks called different collectives, or with different sizes: {called}; every member of "
        f"a group must call the same collectives in the same order"
    )


class Hello(NamedTuple):
    """The first record of a member; its staging bytes are 0 if it got no shared memory."""

    rank: int
    staging_bytes: int

    def pack(self) -> bytes:
        """Return the record."""
        return _HELLO_LAYOUT.pack(_HELLO, _MAGIC, _FORMAT, self.rank, self.staging_bytes)


def pack_failure(error: CommError) -> bytes:
    """Return the record that gives others the reason of this member's failure."""
    text = str(error).encode()[:_MAX_TEXT]
    disagreed = isinstance(error, ProtocolError)
    return _FAILURE_LAYOUT.pack(_FAILURE, disagreed, len(text)) + text


class Inbox:
    """The records of one peer, parsed from the beginning of its stream."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._rest = b""
        self.num_signals = 0
        self.calls: deque[PeerCall] = deque()
        self.descriptors: deque[int] = deque()
        self.hello: Hello | None = None
        self.failure: CommError | None = None
        self.said_goodbye = False

    def feed(self, data: bytes) -> None:
        """Parse `data`, which may end inside a record; raise ProtocolError on garbage."""
        if self._rest:
            data = self._rest + data
        position = 0
        while position < len(data) and (taken := self._take_one(data, position)):
            position += taken
        self._rest = data[position:]

    def close(self) -> None:
        """Close descriptors that arrived but were never used."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _take_one(self, data: bytes, start: int) -> int:
        """Parse the record at `start` and return its size, or 0 if it is not complete."""
        kind = data[start : start + 1]
        if kind == _CALL:
            return self._take_call(data, start)
        if kind == SIGNAL:
            self.num_signals += 1
            return 1
        if kind == GOODBYE:
            self.said_goodbye = True
            return 1
        if kind == _FAILURE:
            return self._take_failure(data, start)
        if kind == _HELLO:
            return self._take_hello(data, start)
        raise self._garbage(f"a record of unknown kind {kind!r}")

    def _take_call(self, data: bytes, start: int) -> int:
        begin = start + _CALL_LAYOUT.size
        if len(data) < begin:
            return 0
        _, number, payload_bytes = _CALL_START.unpack_from(data, start)
        if payload_bytes > MAX_PAYLOAD:
            raise self._garbage(f"a call with {payload_bytes} bytes of data")
        end = begin + int(payload_bytes)
        if len(data) < end:
            return 0
        self.calls.append(PeerCall(number, data[start:begin], data[begin:end]))
        return end - start

    def _take_failure(self, data: bytes, start: int) -> int:
        begin = start + _FAILURE_LAYOUT.size
        if len(data) < begin:
            return 0
        _, disagreed, length = _FAILURE_LAYOUT.unpack_from(data, start)
        end = begin + int(length)
        if len(data) < end:
            return 0
        text = data[begin:end].decode(errors="replace")
        self.failure = ProtocolError(text) if disagreed else PeerLost(text)
        return end - start

    def _take_hello(self, data: bytes, start: int) -> int:
        if len(data) < start + _HELLO_LAYOUT.size:
            return 0
        _, magic, version, rank, staging_bytes = _HELLO_LAYOUT.unpack_from(data, start)
        if (magic, version, rank) != (_MAGIC, _FORMAT, self._peer):
            raise self._garbage(f"a greeting {(magic, version, rank)}")
        self.hello = Hello(rank, staging_bytes)
        return _HELLO_LAYOUT.size

    def _garbage(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"rank {self._peer} sent {what}, which is not a record of a shared-memory group: run "
            f"the same version of ganglion on every rank"
        )
