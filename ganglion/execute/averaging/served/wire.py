"""Messages between a worker and a served centre: a checked header, and weights.

One message is one block of bytes, so it arrives whole or not at all:

    | header, 128 bytes: run, worker, shard, number, step, version, ... checksum | payload |

The checksum covers both. The receiver checks all fields against its own; a difference is a
ProtocolError that names both sides.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ganglion.decide.schedules.exchanges import EXCHANGE, JOIN, LEAVE, LOOK, PULL, PUSH, RETURN
from ganglion.errors import ConfigError, ProtocolError

REPLY, TROUBLE, RESTORE = "reply", "trouble", "restore"
RECALL, REMIND = "recall", "remind"  # read and write the velocity of the centre

AS_SENT = -1.0  # `moved` of a write that moved the centre by exactly what was sent

HEADER_BYTES = 128  # a multiple of the cache line: the payload behind it is aligned
MAX_RUN_ID = 16
_MAGIC, _FORMAT = b"GNEA", 3
# The order of kinds and dtypes is the wire's: new ones go to the end.
_KINDS = (JOIN, LOOK, PULL, PUSH, EXCHANGE, RETURN, LEAVE, REPLY, TROUBLE, RESTORE, RECALL, REMIND)
_DTYPES = (torch.float32, torch.float64, torch.uint8)
# Magic, format, kind, dtype, refused and run come first, then the numbers of an envelope, with the
# number of elements between them.
_FIELDS = struct.Struct("<4sBBBB16siiqqqqdqiidd")
_BEFORE = ("worker", "shard", "number", "step", "version")
_AFTER = ("rate", "staleness", "queue", "members", "apply_s", "moved")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = HEADER_BYTES - _CHECKSUM.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields of a header, except those that follow from the payload.

    A request has the `step` of the worker, the `version` of the centre it saw last and the `rate`
    of its force; a reply has the version of the centre it brings, whether the request was refused,
    how stale it was, how many workers the centre has, and how long it took to move it how far.
    """

    kind: str
    run_id: str
    worker: int
    shard: int = 0
    number: int = 0
    step: int = 0
    version: int = 0
    rate: float = 0.0
    is_refused: bool = False
    staleness: int = 0
    queue: int = 0
    members: int = 0
    apply_s: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The run, shard, size and dtype that one end of a connection accepts."""

    name: str  # in errors: "the centre", "worker 3"
    run_id: str
    shard: int
    numel: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not 0 < len(self.run_id) <= MAX_RUN_ID or not self.run_id.isascii():
            raise ConfigError(
                f"run_id = {self.run_id!r}: give 1 to {MAX_RUN_ID} ASCII characters, the same to "
                f"every worker and server of the run"
            )
        if self.dtype not in _DTYPES[:2]:
            raise ConfigError(
                f"a centre of {self.dtype} cannot be served: keep it in float32 or float64"
            )


class Block:
    """Memory of one message: a header, and a payload to be filled in place."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._bytes = torch.zeros(HEADER_BYTES + numel * dtype.itemsize, dtype=torch.uint8)
        self._memory = _memory_of(self._bytes)
        self.payload = self._bytes[HEADER_BYTES:].view(dtype)

    def seal(self, envelope: Envelope, *, with_payload: bool = True) -> Tensor:
        """Write the header and return the bytes to send; they change with the next seal."""
        size = len(self._memory) if with_payload else HEADER_BYTES
        _FIELDS.pack_into(
            self._memory,
            0,
            _MAGIC,
            _FORMAT,
            _KINDS.index(envelope.kind),
            _DTYPES.index(self.payload.dtype),
            envelope.is_refused,
            envelope.run_id.encode("ascii"),
            *(getattr(envelope, name) for name in _BEFORE),
            self.payload.numel() if with_payload else 0,
            *(getattr(envelope, name) for name in _AFTER),
        )
        _CHECKSUM.pack_into(self._memory, _CHECKSUM_AT, _checksum(self._memory[:size]))
        return self._bytes[:size]


def text_block(envelope: Envelope, text: str) -> Tensor:
    """Return the bytes of a message whose payload is a text."""
    data = text.encode("ascii", "replace")
    block = Block(len(data), torch.uint8)
    if data:
        block.payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return block.seal(envelope)


def text_of(payload: Tensor) -> str:
    """Return the text of a payload."""
    return bytes(payload.tolist()).decode("ascii", "replace")


def open_block(data: Tensor, here: Endpoint, worker: int | None) -> tuple[Envelope, Tensor]:
    """Check a message from or to `worker`; return its header and a view of its payload.

    Without a `worker`, this is the first message of a client, which gives its number.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) < HEADER_BYTES:
        raise _wrong(here, worker, f"{data.dtype} {tuple(data.shape)}", "a block of bytes")
    memory = _memory_of(data)
    magic, form, kind, dtype, refused, run, *numbers = _FIELDS.unpack_from(memory)
    if (magic, form) != (_MAGIC, _FORMAT) or kind >= len(_KINDS) or dtype >= len(_DTYPES):
        raise _wrong(here, worker, f"header {bytes(memory[:8]).hex(' ')}", "a header of Ganglion")
    found = run.rstrip(b"\0").decode("ascii", "replace")
    numel = numbers.pop(len(_BEFORE))
    known = dict(zip((*_BEFORE, *_AFTER), numbers, strict=True))
    envelope = Envelope(kind=_KINDS[kind], run_id=found, is_refused=bool(refused), **known)
    worker = envelope.worker if worker is None else worker
    _check_sides(envelope, here, worker)
    payload = _check_payload(data, memory, here, worker, numel, _DTYPES[dtype])
    return envelope, payload


def _check_sides(envelope: Envelope, here: Endpoint, worker: int) -> None:
    pairs = (
        ("run", envelope.run_id, here.run_id),
        ("worker", envelope.worker, worker),
        ("shard", envelope.shard, here.shard),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise _wrong(here, worker, f"{name} {theirs!r}", f"{name} {ours!r}")


def _check_payload(
    data: Tensor, memory: memoryview, here: Endpoint, worker: int, numel: int, dtype: torch.dtype
) -> Tensor:
    if len(data) != HEADER_BYTES + numel * dtype.itemsize:
        size = f"{len(data) - HEADER_BYTES} bytes for {numel} elements of {dtype}"
        raise _wrong(here, worker, size, "as many as it announces")
    (sent,) = _CHECKSUM.unpack_from(memory, _CHECKSUM_AT)
    found = _checksum(memory)
    if sent != found:
        raise _wrong(here, worker, f"checksum {sent:08x}", f"checksum {found:08x}")
    if numel and dtype != torch.uint8 and (numel, dtype) != (here.numel, here.dtype):
        theirs, ours = f"{numel} elements of {dtype}", f"{here.numel} elements of {here.dtype}"
        raise _wrong(here, worker, theirs, ours)
    return data[HEADER_BYTES:].view(dtype)


def _checksum(memory: memoryview) -> int:
    head = zlib.crc32(memory[:_CHECKSUM_AT])
    return zlib.crc32(memory[HEADER_BYTES:], head)


def _memory_of(data: Tensor) -> memoryview:
    """Return a view of the memory of a plain tensor of bytes, which must outlive it."""
    return memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr())).cast("B")


def _wrong(here: Endpoint, worker: int | None, theirs: str, ours: str) -> ProtocolError:
    caller = "a caller" if worker is None else f"worker {worker}"
    other = "the centre" if here.name.startswith("worker") else caller
    return ProtocolError(
        f"{other} sent {theirs}, but {here.name} has {ours}: give all workers and servers of one "
        f"run the same run_id, the same model and numbers of their own"
    )
