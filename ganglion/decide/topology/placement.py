"""Placement: which axes split a parameter, and which hold copies whose gradients must be summed.

A typed record, never attributes of a tensor: a misspelt attribute would be a gradient that is
silently not reduced.

    weight (n, k)    dim 0 over x, then over z; dim 1 over y; copies along data
    bias (n)         dim 0 over x; copies along y are equal without a sum, those along z and data
                     saw other samples: their gradients are summed
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ganglion.decide.topology.mesh import AXES, Coordinates, Mesh
from ganglion.errors import LayoutError

TENSOR_AXES: tuple[str, ...] = ("x", "y", "z")


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor dim cut into equal pieces along one axis.

    A dim may consist of equal `sections`, such as fused queries, keys and values: then every
    section is cut, and a piece has its part of each.
    """

    dim: int
    axis: str
    sections: int = 1


class Box(NamedTuple):
    """A part of a parameter that a rank holds: start in the whole, start in the piece, size."""

    start: tuple[int, ...]
    local_start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a parameter that is not split."""
        return cls((0,) * len(shape), (0,) * len(shape), shape)

    @property
    def in_whole(self) -> tuple[slice, ...]:
        """The index of the part in the whole."""
        return _slices(self.start, self.size)

    @property
    def in_piece(self) -> tuple[slice, ...]:
        """The index of the part in the rank's piece."""
        return _slices(self.local_start, self.size)


def _slices(starts: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))


_Interval = tuple[int, int]  # start and length


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of one parameter: full shape, cuts, and the axes to sum gradients over.

    Cuts of one dim are applied in the order listed: the first makes the coarsest pieces. An axis
    that neither cuts nor is `replicated` holds copies that are equal without a sum, because its
    ranks compute the same.
    """

    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    replicated: tuple[str, ...] = ("data",)

    def __post_init__(self) -> None:
        split = [shard.axis for shard in self.shards]
        for axis in (*split, *self.replicated):
            if axis not in AXES:
                raise LayoutError(f"unknown axis {axis!r}; the axes are {list(AXES)}")
        if len({*split, *self.replicated}) != len(split) + len(self.replicated):
            raise LayoutError(
                f"each axis may split a parameter or replicate it, once: split {split}, "
                f"replicated {list(self.replicated)}"
            )
        cut: set[int] = set()
        for shard in self.shards:
            if not 0 <= shard.dim < len(self.shape):
                raise LayoutError(f"dim {shard.dim} is outside a tensor of shape {self.shape}")
            assert shard.sections == 1 or shard.dim not in cut, "sections are those of the whole"
            cut.add(shard.dim)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of one rank's piece; raise LayoutError if sizes do not divide."""
        sizes = list(self.shape)
        for shard in self.shards:
            size, parts = sizes[shard.dim], mesh.size(shard.axis)
            if size % (parts * shard.sections):
                sections = f" in {shard.sections} sections" if shard.sections > 1 else ""
                raise LayoutError(
                    f"dim {shard.dim} of a parameter of shape {self.shape} has {size} entries"
                    f"{sections}, which {shard.axis}={parts} does not divide: choose a size that "
                    f"is a multiple of {parts * shard.sections}"
                )
            sizes[shard.dim] = size // parts
        return tuple(sizes)

    def offsets(self, mesh: Mesh, coordinates: Coordinates) -> tuple[int, ...]:
        """Return the start of one rank's piece in the full parameter."""
        return self.boxes(mesh, coordinates)[0].start

    def boxes(self, mesh: Mesh, coordinates: Coordinates) -> list[Box]:
        """Return the parts of the whole that make up one rank's piece; one, without sections."""
        self.local_shape(mesh)
        dims: list[list[_Interval]] = [[(0, size)] for size in self.shape]
        for shard in self.shards:
            place = (mesh.size(shard.axis), coordinates.along(shard.axis))
            dims[shard.dim] = _cut(dims[shard.dim], shard.sections, *place)
        located = [_located(intervals) for intervals in dims]
        return [
            Box(
                tuple(start for start, _, _ in spot),
                tuple(local for _, local, _ in spot),
                tuple(size for _, _, size in spot),
            )
            for spot in product(*located)
        ]

    def num_copies(self, mesh: Mesh) -> int:
        """Return the number of ranks of one replica and stage that hold the same piece."""
        split = {shard.axis for shard in self.shards}
        return math.prod(mesh.size(axis) for axis in TENSOR_AXES if axis not in split)


def _cut(intervals: list[_Interval], sections: int, parts: int, coordinate: int) -> list[_Interval]:
    """Return the part that a coordinate gets of intervals laid end to end."""
    if sections > 1:
        ((start, length),) = intervals
        each, piece = length // sections, length // sections // parts
        return [(start + i * each + coordinate * piece, piece) for i in range(sections)]
    total = sum(length for _, length in intervals)
    low, high = total * coordinate // parts, total * (coordinate + 1) // parts
    found, position = [], 0
    for start, length in intervals:
        first, last = max(low, position), min(high, position + length)
        if first < last:
            found.append((start + first - position, last - first))
        position += length
    return found


def _located(intervals: list[_Interval]) -> list[tuple[int, int, int]]:
    """Return (start in the whole, start in the piece, length) of each interval."""
    located, position = [], 0
    for start, length in intervals:
        located.append((start, position, length))
        position += length
    return located
