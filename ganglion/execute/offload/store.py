"""The state of some parameters on a tier: for each entry, such as `exp_avg`, one region.

All regions have the same layout: one parameter after the other in the order of the update, each
from a page on. So a bucket is one stretch of every region, moved at once, and the entry of a
parameter is one stretch too, however many buckets it was cut into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.decide.schedules.buckets import UpdateBucket, padded
from ganglion.execute.offload.tiers import Region, Tier, page_buffer


class Member(NamedTuple):
    """A parameter, as far as its state is concerned."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def room_bytes(self) -> int:
        """What it takes up in a region."""
        return padded(self.num_elements) * self.dtype.itemsize


class StateStore:
    """Entries by name, each of them for all members."""

    def __init__(self, tier: Tier, members: Sequence[Member]) -> None:
        """Lay out the members, in order; no entry is there yet."""
        self._tier = tier
        self._members = members
        ends, self._starts = 0, list[int]()
        for member in members:
            self._starts.append(ends)
            ends += member.room_bytes
        self._num_bytes = ends
        self._regions: dict[str, Region] = {}

    @property
    def num_bytes(self) -> int:
        """How many bytes of the tier are reserved."""
        return self._tier.num_bytes

    def describe(self) -> str:
        """Say where the entries are."""
        return self._tier.describe()

    def reserve(self, entry: str) -> None:
        """Make room for an entry of all members, if there is none."""
        if entry not in self._regions:
            self._regions[entry] = self._tier.reserve(self._num_bytes)

    def view(self, entry: str, number: int) -> Tensor:
        """Return the entry of a member, shaped like it: the tier itself, not a copy."""
        self.reserve(entry)
        member, start = self._members[number], self._starts[number]
        stop = start + member.num_elements * member.dtype.itemsize
        whole = self._regions[entry].tensor()
        return whole[start:stop].view(member.dtype).view(member.shape)

    def read(self, entry: str, bucket: UpdateBucket, out: Tensor) -> int:
        """Fill the bytes `out` with a bucket of an entry; return how many there were."""
        start, size = self._stretch(bucket)
        self._regions[entry].read_into(start, out[:size])
        return size

    def write(self, entry: str, bucket: UpdateBucket, source: Tensor) -> int:
        """Write a bucket of an entry back; return how many bytes there were."""
        start, size = self._stretch(bucket)
        self._regions[entry].write_from(start, source[:size])
        return size

    def tensors(self) -> list[Tensor]:
        """Return all entries, each as bytes: the tier itself."""
        return [region.tensor() for region in self._regions.values()]

    def release(self) -> None:
        """Give back the memory that views of entries took."""
        for region in self._regions.values():
            region.release()

    def close(self) -> None:
        """Give the tier back."""
        self._regions.clear()
        self._tier.close()

    def bucket_bytes(self, bucket: UpdateBucket) -> int:
        """Return what one entry of a bucket takes up."""
        return self._stretch(bucket)[1]

    def _stretch(self, bucket: UpdateBucket) -> tuple[int, int]:
        first = bucket.slices[0]
        itemsize = self._members[first.member].dtype.itemsize
        start = self._starts[first.member] + first.start * itemsize
        return start, bucket.num_elements * itemsize


class Slot:
    """Room on the device for one bucket: the same bytes again and again, by entry."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Take no memory before an entry is asked for."""
        self._num_bytes = num_bytes
        self._device = device
        self._rooms: dict[str, Tensor] = {}

    def room(self, entry: str) -> Tensor:
        """Return the bytes of an entry."""
        if entry not in self._rooms:
            self._rooms[entry] = page_buffer(self._num_bytes, self._device)
        return self._rooms[entry]

    def rooms(self) -> list[Tensor]:
        """Return the bytes of all entries that were asked for."""
        return list(self._rooms.values())

    def piece(self, entry: str, bucket: UpdateBucket, number: int, member: Member) -> Tensor:
        """Return the entry of one slice of a bucket, flat."""
        offset, part = bucket.offsets[number], bucket.slices[number]
        start = offset * member.dtype.itemsize
        stop = start + (part.stop - part.start) * member.dtype.itemsize
        return self.room(entry)[start:stop].view(member.dtype)
