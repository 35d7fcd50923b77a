"""Tiers: where optimizer state lives when it is not on the device, and regions of bytes on them.

A region is moved piece by piece, in whole pages, by threads; as a whole it is a tensor that a
checkpoint saves and loads like any other. Moves and that tensor see the same bytes, but never at
the same time: checkpoints are taken between updates.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

PAGE_BYTES = 4096


class Region(Protocol):
    """Some bytes of a tier; starts and sizes of moves are multiples of a page."""

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""

    def read_into(self, start: int, out: Tensor) -> None:
        """Fill a flat tensor of bytes from the region, beginning at byte `start`."""

    def write_from(self, start: int, source: Tensor) -> None:
        """Copy a flat tensor of bytes into the region, beginning at byte `start`."""

    def tensor(self) -> Tensor:
        """Return the whole as a flat tensor of bytes that the tier backs: no copy."""

    def release(self) -> None:
        """Give back the memory that using `tensor` took; what was written through it stays."""


class Tier(Protocol):
    """A place for regions."""

    @property
    def num_bytes(self) -> int:
        """How many bytes are reserved."""

    def reserve(self, num_bytes: int) -> Region:
        """Return a new region; raise OffloadError if there is no room for it."""

    def describe(self) -> str:
        """Say what and where it is, for the log."""

    def close(self) -> None:
        """Give everything back."""


def page_buffer(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Return a flat tensor of bytes that begins on a page, as direct input and output want it."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    room = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=pinned)
    start = -room.data_ptr() % PAGE_BYTES
    return room[start : start + num_bytes]
