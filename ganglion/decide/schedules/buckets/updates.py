"""The cut of parameters into buckets of an update, each of a bounded number of elements.

    parameters      a a a b   c c c c c c c c c c     c is larger than a bucket and may be cut
    buckets        [a a a b c][c c c c c][c c c c]

A slice begins at a multiple of a grain inside its parameter, and takes whole grains of its bucket.
So kernels that treat the last few elements separately (the tail of a vectorised loop rounds
differently) do so with the same elements as without a cut, and every slice begins on a page of disk
and memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ganglion.errors import ConfigError

GRAIN = 2048  # elements: a page of 4096 bytes even with two bytes an element


class Slice(NamedTuple):
    """Elements `start` to `stop` of a flat parameter, by its position in the given order."""

    member: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class UpdateBucket:
    """Slices that are updated together; `num_elements` includes the gaps between them."""

    slices: tuple[Slice, ...]
    offsets: tuple[int, ...]
    num_elements: int


def padded(num_elements: int) -> int:
    """Return `num_elements` rounded up to whole grains."""
    return -(-num_elements // GRAIN) * GRAIN


def cut_update(
    sizes: Sequence[int],
    is_divisible: Sequence[bool],
    kinds: Sequence[Hashable],
    bucket_size: int,
) -> tuple[UpdateBucket, ...]:
    """Return buckets of at most `bucket_size` elements, in order, each of one kind.

    A parameter that is not divisible stays whole, if need be in a larger bucket of its own.
    """
    if bucket_size < GRAIN:
        raise ConfigError(
            f"memory.bucket_size = {bucket_size} elements is less than {GRAIN}, the least that "
            f"is moved at once: set it to {GRAIN} or more"
        )
    whole = bucket_size // GRAIN * GRAIN
    filling = _Filling(whole)
    for member, (size, divisible, kind) in enumerate(zip(sizes, is_divisible, kinds, strict=True)):
        filling.begin(kind)
        filling.take(member, size, divisible)
    filling.close()
    return tuple(filling.buckets)


class _Filling:
    """Buckets as they fill up."""

    def __init__(self, bound: int) -> None:
        self.buckets: list[UpdateBucket] = []
        self._bound = bound
        self._slices: list[Slice] = []
        self._offsets: list[int] = []
        self._used = 0
        self._kind: Hashable = None

    def begin(self, kind: Hashable) -> None:
        if kind != self._kind:
            self.close()
        self._kind = kind

    def take(self, member: int, size: int, divisible: bool) -> None:
        start = 0
        while start < size:
            room = self._bound - self._used
            if room <= 0 or (not divisible and padded(size) > room and self._used):
                self.close()
                continue
            stop = min(size, start + room) if divisible else size
            self._slices.append(Slice(member, start, stop))
            self._offsets.append(self._used)
            self._used += padded(stop - start)
            start = stop

    def close(self) -> None:
        if self._slices:
            bucket = UpdateBucket(tuple(self._slices), tuple(self._offsets), self._used)
            self.buckets.append(bucket)
        self._slices, self._offsets, self._used = [], [], 0
