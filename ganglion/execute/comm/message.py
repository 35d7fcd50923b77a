"""The header of a message: its purpose, and the shape and dtype of its tensor.

A header has a fixed layout and is never pickled, so garbage on a wire is a ProtocolError. It has
two parts: numbers that change with every message, and a form that thousands of messages share and
that is therefore packed and parsed once:

    numbers:  step, stage, microbatch, version, flow
    form:     magic, format, dims, dtype, device, kind, bytes, shape
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.errors import ProtocolError

MAX_DIMS = 64  # the limit of torch
MAX_KIND = 15
HOST_MEMORY, DEVICE_MEMORY = 0, 1

_MAGIC = b"GNGL"
_FORMAT = 1
# The wire carries positions: append new dtypes at the end.
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_FIXED = struct.Struct("<4sBBBB16sQ")
_SHAPES = tuple(struct.Struct(f"<{dims}q") for dims in range(MAX_DIMS + 1))
_MAX_CACHED = 1024

Numbers = tuple[int, int, int, int, int]  # step, stage, microbatch, version, flow
NUMBERS = struct.Struct("<qqqqq")
MAX_FORM_BYTES = _FIXED.size + 8 * MAX_DIMS


class Form(NamedTuple):
    """The part of a header that messages of one sort share."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: int
    num_bytes: int


class Header(NamedTuple):
    """The purpose and contents of a message; numbers without a meaning are -1.

    `flow` is the same number on both sides and joins their trace events. `device` is the memory
    that the sender had the tensor in.
    """

    kind: str
    step: int
    stage: int
    microbatch: int
    version: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    flow: int = -1
    device: int = HOST_MEMORY

    def __str__(self) -> str:
        """Return the kind, the numbers that have a meaning, dtype and shape."""
        names = ("step", "stage", "microbatch", "version")
        given = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) != -1]
        return ", ".join([self.kind, *given, f"{self.dtype} {tuple(self.shape)}"])


def make_header(form: Form, numbers: Numbers) -> Header:
    """Return the header of a form and its numbers."""
    kind, shape, dtype, device, _ = form
    return Header(kind, *numbers[:4], shape, dtype, numbers[4], device)


def header_numbers(header: Header) -> Numbers:
    """Return the numbers of a header."""
    return header.step, header.stage, header.microbatch, header.version, header.flow


class Arrival(NamedTuple):
    """A received message; the tensor belongs to the receiver."""

    source: int
    header: Header
    tensor: Tensor


def local_arrival(source: int, kind: str, tensor: Tensor, numbers: Numbers) -> Arrival:
    """Return a message that crosses no wire; `tensor` belongs to the receiver already."""
    header = Header(kind, *numbers[:4], tensor.shape, tensor.dtype, numbers[4])
    return Arrival(source, header, tensor)


def plain_copy(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a contiguous copy on the host, or on `device`."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return copy.copy_(tensor.detach())


class Forms:
    """Packs and parses forms, and caches them."""

    def __init__(self) -> None:
        self._packed: dict[tuple[str, tuple[int, ...], torch.dtype, int], bytes] = {}
        self._parsed: dict[bytes, Form] = {}

    def pack(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: int = HOST_MEMORY
    ) -> bytes:
        """Return the form as bytes; raise ProtocolError if the wire cannot carry it."""
        key = (kind, shape, dtype, device)
        packed = self._packed.get(key)
        if packed is None:
            packed = _pack_form(*key)
            if len(self._packed) >= _MAX_CACHED:
                self._packed.clear()
            self._packed[key] = packed
        return packed

    def parse(self, data: bytes, source: int) -> Form:
        """Parse a form; raise ProtocolError that names `source` for garbage."""
        form = self._parsed.get(data)
        if form is None:
            form = _parse_form(data, source)
            if len(self._parsed) >= _MAX_CACHED:
                self._parsed.clear()
            self._parsed[data] = form
        return form


def flow_number(rank: int, count: int) -> int:
    """Return the number of a message, unique in the run: its sender and the sender's count."""
    return rank << 40 | count


def _pack_form(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> bytes:
    code = _CODES.get(dtype)
    fits = 0 < len(kind) <= MAX_KIND and kind.isascii() and "\0" not in kind
    if code is None or len(shape) > MAX_DIMS or not fits:
        raise ProtocolError(
            f"a message cannot carry kind {kind!r}, {dtype} {tuple(shape)}: give it a kind of 1 to "
            f"{MAX_KIND} ASCII characters, at most {MAX_DIMS} dims and a plain dtype such as "
            f"torch.bfloat16"
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    name = kind.encode("ascii")
    fixed = _FIXED.pack(_MAGIC, _FORMAT, len(shape), code, device, name, num_bytes)
    return fixed + _SHAPES[len(shape)].pack(*shape)


def _parse_form(data: bytes, source: int) -> Form:
    if len(data) < _FIXED.size:
        raise _unreadable(source, data)
    magic, form, dims, code, device, name, num_bytes = _FIXED.unpack_from(data)
    known = magic == _MAGIC and form == _FORMAT and dims <= MAX_DIMS and code < len(_DTYPES)
    if not known or len(data) != _FIXED.size + 8 * dims:
        raise _unreadable(source, data)
    shape = _SHAPES[dims].unpack_from(data, _FIXED.size)
    dtype = _DTYPES[code]
    kind = name.rstrip(b"\0")
    consistent = min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == num_bytes
    if not consistent or not kind.isascii():
        raise _unreadable(source, data)
    return Form(kind.decode("ascii"), shape, dtype, device, num_bytes)


def _unreadable(source: int, data: bytes) -> ProtocolError:
    return ProtocolError(
        f"rank {source} sent bytes that are not a message header ({data[:16].hex(' ')} ...): check "
        f"that all ranks run the same version of Ganglion"
    )
