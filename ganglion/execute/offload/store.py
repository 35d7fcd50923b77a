"""The state of some parameters on a tier: one region for each entry, such as `exp_avg`.

All regions have the same layout: parameters in the order of the update, each aligned to a page. So
a bucket is one contiguous range of every region, and so is the entry of a parameter, however many
buckets it was cut into.
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
    """Name, shape and dtype of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def room_bytes(self) -> int:
        """The bytes it takes up in a region."""
        return padded(self.num_elements) * self.dtype.itemsize


class StateStore:
    """Entries by name, each of them for all members."""

    def __init__(self, tier: Tier, members: Sequence[Member]) -> None:
        """Lay out the members in order, without any entry."""
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
        """The bytes of the tier that are reserved."""
        return self._tier.num_bytes

    def describe(self) -> str:
        """Return where the entries are, for the log."""
        return self._tier.describe()

    def reserve(self, entry: str) -> None:
        """Reserve an entry of all members, if it is not yet there."""
        if entry not in self._regions:
            self._regions[entry] = self._tier.reserve(self._num_bytes)

    def view(self, entry: str, number: int) -> Tensor:
        """Return the entry of a member, shaped like it: a view of the tier."""
        self.reserve(entry)
        member, start = self._members[number], self._starts[number]
        stop = start + member.num_elements * member.dtype.itemsize
        whole = self._regions[entry].tensor()
        return whole[start:stop].view(member.dtype).view(member.shape)

    def read(self, entry: str, bucket: UpdateBucket, out: Tensor) -> int:
        """Fill the bytes `out` with a bucket of an entry; return the bytes read."""
        start, size = self._stretch(bucket)
        self._regions[entry].read_into(start, out[:size])
        return size

    def write(self, entry: str, bucket: UpdateBucket, source: Tensor) -> int:
        """Write a bucket of an entry back; return the bytes written."""
        start, size = self._stretch(bucket)
        self._regions[entry].write_from(start, source[:size])
        return size

    def tensors(self) -> list[Tensor]:
        """Return all entries, each as bytes: views of the tier."""
        return [region.tensor() for region in self._regions.values()]

    def release(self) -> None:
        """Free the memory that views of entries took."""
        for region in self._regions.values():
            region.release()

    def close(self) -> None:
        """Close the tier."""
        self._regions.clear()
        self._tier.close()

    def bucket_bytes(self, bucket: UpdateBucket) -> int:
        """Return the bytes of one entry of a bucket."""
        return self._stretch(bucket)[1]

    def _stretch(self, bucket: UpdateBucket) -> tuple[int, int]:
        first = bucket.slices[0]
        itemsize = self._members[first.member].dtype.itemsize
        start = self._starts[first.member] + first.start * itemsize
        return start, bucket.num_elements * itemsize


class Slot:
    """Memory on the device for one bucket, by entry, used again for every bucket."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate an entry when it is first used."""
        self._num_bytes = num_bytes
        self._device = device
        self._rooms: dict[str, Tensor] = {}

    def room(self, entry: str) -> Tensor:
        """Return the bytes of an entry."""
        if entry not in self._rooms:
            self._rooms[entry] = page_buffer(self._num_bytes, self._device)
        return self._rooms[entry]

    def rooms(self) -> list[Tensor]:
        """Return the bytes of all entries in use."""
        return list(self._rooms.values())

    def piece(self, entry: str, bucket: UpdateBucket, number: int, member: Member) -> Tensor:
        """Return the entry of one slice of a bucket, flat."""
        offset, part = bucket.offsets[number], bucket.slices[number]
        start = offset * member.dtype.itemsize
        stop = start + (part.stop - part.start) * member.dtype.itemsize
        return self.room(entry)[start:stop].view(member.dtype)
