"""Compressed sums of differences, with error feedback.

    v = difference + residual        q = encode(v)        residual = v - decode(q)

All workers gather all q and add the decoded values in order of rank, in full precision, so all get
the same bits. Rounding errors stay in the residual and are sent the next time. Raw weights are
never compressed: their rounding would not shrink as the workers come together.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods.sums import Meter, allocate
from ganglion.execute.comm import Group, Handle

_BLOCK = 256


class Codec(Protocol):
    """Turns a vector into fewer bytes and back."""

    def num_bytes(self, numel: int) -> int:
        """Return the size of the code of so many elements."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write the code of `values` into the bytes `out`."""

    def decode(self, code: Tensor, out: Tensor) -> None:
        """Write the values of a code into `out`."""


class HalfCodec:
    """16 bits an element, by rounding to bfloat16 or float16."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def num_bytes(self, numel: int) -> int:
        """Return two bytes for each value."""
        return 2 * numel

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Round the values."""
        out.view(self._dtype).copy_(values)

    def decode(self, code: Tensor, out: Tensor) -> None:
        """Widen the values, which is exact."""
        out.copy_(code.view(self._dtype))


class Int8Codec:
    """8 bits an element, and one float32 scale for each block of 256."""

    def num_bytes(self, numel: int) -> int:
        """Return one byte for each value and four for each block; the last block is padded."""
        return (_BLOCK + 4) * -(-numel // _BLOCK)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Round to 127 steps of each block's greatest value, up and down."""
        scales, steps = self._parts(out)
        blocks = torch.zeros(steps.shape, dtype=torch.float32, device=values.device)
        blocks.view(-1)[: values.numel()].copy_(values)
        scales.copy_(blocks.abs().amax(dim=1) / 127.0)
        # A block of zeros has scale 0: divided by 1, it stays zero.
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
        steps.copy_((blocks / divisors[:, None]).round_().clamp_(-127, 127))

    def decode(self, code: Tensor, out: Tensor) -> None:
        """Multiply the steps by their block's scale."""
        scales, steps = self._parts(code)
        values = steps.to(torch.float32) * scales[:, None]
        out.copy_(values.view(-1)[: out.numel()])

    def _parts(self, code: Tensor) -> tuple[Tensor, Tensor]:
        num_blocks = code.numel() // (_BLOCK + 4)
        scales, steps = code[: 4 * num_blocks], code[4 * num_blocks :]
        return scales.view(torch.float32), steps.view(torch.int8).view(num_blocks, _BLOCK)


def make_codec(name: str) -> Codec:
    """Return the codec of an option `compress`."""
    codecs: dict[str, Codec] = {
        "bf16": HalfCodec(torch.bfloat16),
        "fp16": HalfCodec(torch.float16),
        "int8": Int8Codec(),
    }
    if name not in codecs:
        raise ConfigError(f"compress = {name!r} is not one of {[*codecs]}: choose one, or None")
    return codecs[name]


class CompressedSum:
    """A sum over all workers that sends codes only."""

    def __init__(self, group: Group, like: Tensor, codec: Codec, meter: Meter) -> None:
        """Sum vectors like `like`, with an empty residual."""
        self.buffer = torch.zeros_like(like)
        self.residual = torch.zeros_like(like)
        self._group, self._codec, self._meter = group, codec, meter
        # Codes begin at multiples of 64 bytes, so that each can be seen as wider elements.
        size = -(-codec.num_bytes(like.numel()) // 64) * 64
        code = torch.zeros(size, dtype=torch.uint8, device=like.device)
        self._mine = allocate(group, code)
        self._all = allocate(group, code.repeat(group.size))
        self._handle: Handle | None = None

    def start(self) -> None:
        """Start to sum the buffer and the residual."""
        self.residual.add_(self.buffer)
        self._codec.encode(self.residual, self._code(self._mine))
        self._codec.decode(self._code(self._mine), self.buffer)
        self.residual.sub_(self.buffer)
        self._handle = self._group.all_gather(self._all, self._mine)
        self._meter.sent_bytes += self._mine.nbytes

    def wait(self) -> Tensor:
        """Return the buffer when it holds the sum of the decoded values."""
        if self._handle is not None:
            self._meter.wait([self._handle])
            self._handle = None
            self._add_up()
        return self.buffer

    def discard(self) -> None:
        """Add the unused code to the residual."""
        self._codec.decode(self._code(self._mine), self.buffer)
        self.residual.add_(self.buffer)

    def tensors(self) -> list[Tensor]:
        """Return the sum, the residual and the codes."""
        return [self.buffer, self.residual, self._mine, self._all]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the residual."""
        return {"residual": self.residual.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the residual; zero it if the state has none, for the workers were others."""
        if "residual" in state:
            self.residual.copy_(state["residual"])
        else:
            self.residual.zero_()

    def _add_up(self) -> None:
        part = torch.empty_like(self.buffer)
        self.buffer.zero_()
        for code in self._all.view(self._group.size, -1):
            self._codec.decode(self._code(code), part)
            self.buffer.add_(part)

    def _code(self, padded: Tensor) -> Tensor:
        return padded[: self._codec.num_bytes(self.buffer.numel())]
