"""Buckets of gradients that are reduced together, decided from sizes alone.

Backward finishes the last layers first, so buckets are filled in reverse order of use. Each bucket
is one flat buffer and one all-reduce, started when its last gradient is ready:

    parameters in forward order     a  b  c  d  e  f
    buckets                         [ 2  ][ 1 ][ 0 ]        0 is reduced first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ganglion.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters (by position in forward order) and where each begins in the flat buffer."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    num_elements: int


def plan_buckets(
    sizes: Sequence[int], max_elements: int, *, last_max_elements: int | None = None
) -> tuple[Bucket, ...]:
    """Return buckets of at most `max_elements` for parameters of these sizes, last layers first.

    A parameter larger than the bound gets a bucket of its own. No backward hides the reduction of
    the last bucket, which holds the first layers; `last_max_elements` keeps it small.
    """
    if max_elements < 1:
        raise LayoutError(f"a bucket of {max_elements} elements holds no gradient; use 1 or more")
    tail = _tail(sizes, max_elements if last_max_elements is None else last_max_elements)
    buckets = _fill(range(len(sizes) - 1, tail - 1, -1), sizes, max_elements)
    return (*buckets, *_fill(range(tail - 1, -1, -1), sizes, max_elements))


def _tail(sizes: Sequence[int], bound: int) -> int:
    """Return how many of the first parameters fit the bucket that is reduced last."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > bound:
            return max(count, min(1, len(sizes)))
    return len(sizes)


def _fill(order: Sequence[int], sizes: Sequence[int], bound: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    members: list[int] = []
    total = 0
    for index in order:
        if members and total + sizes[index] > bound:
            buckets.append(_bucket(members, sizes))
            members, total = [], 0
        members.append(index)
        total += sizes[index]
    return [*buckets, _bucket(members, sizes)] if members else buckets


def _bucket(members: Sequence[int], sizes: Sequence[int]) -> Bucket:
    offsets, total = [], 0
    for index in members:
        offsets.append(total)
        total += sizes[index]
    return Bucket(tuple(members), tuple(offsets), total)
