"""What members tell each other about a collective: small records on a Unix stream socket.

    call     which collective, on what: members compare these, so a mismatch has a name
    signal   "my part of this slab is in shared memory": one byte
    failure  why this member gave up: the others need not wait for it
    goodbye  this member closed the group: a hang-up without it is a death
    hello    first record: the size of this member's staging memory, with its descriptor

Records have a fixed layout, never a pickle. A small collective's data follow its call.
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
_OPS = ("", SUM, MAX)
# The order is the wire's: new dtypes go to the end.
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
_OP_CODES = {op: code for code, op in enumerate(_OPS)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

SIGNAL, GOODBYE = b"S", b"B"
_CALL, _FAILURE, _HELLO = b"C", b"F", b"H"
# Number and bytes of data come first, then what members must agree on, then where data lie.
_CALL_LAYOUT = struct.Struct("<cQQBBBIQiQQ")
_CALL_START = struct.Struct("<cQQ")
_WISH = slice(_CALL_START.size, struct.calcsize("<cQQBBBIQ"))
_FAILURE_LAYOUT = struct.Struct("<cBH")
_HELLO_LAYOUT = struct.Struct("<c4sHIQ")
_MAGIC, _FORMAT = b"GNGC", 1
_MAX_TEXT = 4000
MAX_PAYLOAD = 1 << 20


class Call(NamedTuple):
    """One member's call of one collective; `segment` to `offset` say where its data lie."""

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
        number, kind, op, dtype, root, num_elements, segment, segment_bytes, offset = self
        return _CALL_LAYOUT.pack(
            _CALL,
            number,
            payload_bytes,
            _KIND_CODES[kind],
            _OP_CODES[op],
            _DTYPE_CODES[dtype],
            root,
            num_elements,
            segment,
            segment_bytes,
            offset,
        )

    def __str__(self) -> str:
        options = [self.op] if self.op else []
        if self.kind in ("broadcast", "reduce"):
            options.append(f"root={self.root}")
        name = f"{self.kind}({', '.join(options)})" if options else self.kind
        if self.kind == "barrier":
            return name
        return f"{name} of {self.num_elements} {str(self.dtype).removeprefix('torch.')}"


class Arrival(NamedTuple):
    """A call of a peer, as it came: it is taken apart only where that is needed."""

    number: int
    record: bytes
    payload: bytes

    def call(self) -> Call:
        """Return the call."""
        _, number, _, kind, op, dtype, *rest = _CALL_LAYOUT.unpack(self.record)
        if kind >= len(KINDS) or op >= len(_OPS) or dtype >= len(DTYPES):
            raise ProtocolError(f"a call with unknown codes {(kind, op, dtype)} arrived")
        return Call(number, KINDS[kind], _OPS[op], DTYPES[dtype], *rest)


def check_agreement(ranks: tuple[int, ...], mine: Call, arrivals: Mapping[int, Arrival]) -> None:
    """Raise ProtocolError, naming what each rank called, unless all called the same.

    `arrivals` are the calls of the other members, by position.
    """
    wish = mine.pack()[_WISH]
    for arrival in arrivals.values():
        if arrival.record[_WISH] != wish:
            break
    else:
        return
    calls = {index: arrival.call() for index, arrival in arrivals.items()}
    called = {rank: str(calls.get(index, mine)) for index, rank in enumerate(ranks)}
    raise ProtocolError(
        f"ranks called different collectives, or with different sizes: {called}; every member of "
        f"a group must call the same collectives in the same order"
    )


class Hello(NamedTuple):
    """The first record of a member; no staging bytes means that it got no shared memory."""

    rank: int
    staging_bytes: int

    def pack(self) -> bytes:
        """Return the record."""
        return _HELLO_LAYOUT.pack(_HELLO, _MAGIC, _FORMAT, self.rank, self.staging_bytes)


def pack_failure(error: CommError) -> bytes:
    """Return the record that tells others why this member gave up."""
    text = str(error).encode()[:_MAX_TEXT]
    disagreed = isinstance(error, ProtocolError)
    return _FAILURE_LAYOUT.pack(_FAILURE, disagreed, len(text)) + text


class Inbox:
    """The records of one peer, parsed from its stream."""

    def __init__(self, peer: int) -> None:
        """Start at the beginning of the stream of `peer`."""
        self._peer = peer
        self._rest = b""
        self.num_signals = 0
        self.calls: deque[Arrival] = deque()
        self.descriptors: deque[int] = deque()
        self.hello: Hello | None = None
        self.failure: CommError | None = None
        self.said_goodbye = False

    def feed(self, data: bytes) -> None:
        """Take what has arrived, in pieces of any size; raise ProtocolError on garbage."""
        if self._rest:
            data = self._rest + data
        position = 0
        while position < len(data):
            taken = self._take_one(data, position)
            if not taken:
                break
            position += taken
        self._rest = data[position:]

    def close(self) -> None:
        """Close descriptors that arrived and were never used."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _take_one(self, data: bytes, start: int) -> int:
        """Parse the record at `start` and return its bytes; 0 if it is not complete."""
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
        self.calls.append(Arrival(number, data[start:begin], data[begin:end]))
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
            f"rank {self._peer} sent {what}, which is no record of a shared-memory group: run the "
            f"same version of ganglion on every rank"
        )
