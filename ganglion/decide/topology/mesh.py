"""The mesh: ranks numbered along five axes, and the groups of ranks along any of them.

A rank is a number in a mixed-radix system whose digits are the coordinates. The first axis of the
rank order is the innermost digit, so neighbours along it are consecutive ranks:

    sizes x=2, data=2, order (x, y, z, data, pipe)      rank    0  1  2  3
                                                        x       0  1  0  1
                                                        data    0  0  1  1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

from ganglion.errors import LayoutError

AXES: tuple[str, ...] = ("data", "pipe", "x", "y", "z")
DEFAULT_RANK_ORDER: tuple[str, ...] = ("x", "y", "z", "data", "pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's position along every axis."""

    data: int = 0
    pipe: int = 0
    x: int = 0
    y: int = 0
    z: int = 0

    def along(self, axis: str) -> int:
        """Return the coordinate of one axis."""
        return int(getattr(self, axis))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the five axes and the order in which they number the ranks."""

    data: int = 1
    pipe: int = 1
    x: int = 1
    y: int = 1
    z: int = 1
    rank_order: tuple[str, ...] = field(default=DEFAULT_RANK_ORDER)

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise LayoutError(
                    f"axis {axis} has size {self.size(axis)}; every axis needs at least 1: "
                    f"set it to 1 if it is unused"
                )
        if sorted(self.rank_order) != sorted(AXES):
            raise LayoutError(
                f"rank_order {list(self.rank_order)} must name each of {sorted(AXES)} once; "
                f"the default is {list(DEFAULT_RANK_ORDER)}"
            )

    def size(self, axis: str) -> int:
        """Return the number of ranks along one axis."""
        return int(getattr(self, axis))

    @property
    def num_ranks(self) -> int:
        """The product of all axes."""
        return math.prod(self.size(axis) for axis in AXES)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(f"rank {rank} is outside a mesh of {self.num_ranks} ranks")
        digits: dict[str, int] = {}
        for axis in self.rank_order:
            rank, digits[axis] = divmod(rank, self.size(axis))
        return Coordinates(**digits)

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank at a position; the inverse of `coordinates`."""
        number = 0
        for axis in reversed(self.rank_order):
            digit = coordinates.along(axis)
            if not 0 <= digit < self.size(axis):
                raise LayoutError(f"coordinate {axis}={digit} is outside 0..{self.size(axis) - 1}")
            number = number * self.size(axis) + digit
        return number

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, in rank order."""
        free = frozenset(axes)
        unknown = sorted(free - set(AXES))
        if unknown:
            raise LayoutError(f"unknown axis {unknown[0]!r}; the axes are {list(AXES)}")
        here = self.coordinates(rank)
        ranges = [range(self.size(axis)) if axis in free else (here.along(axis),) for axis in AXES]
        members = (Coordinates(**dict(zip(AXES, spot, strict=True))) for spot in product(*ranges))
        return tuple(sorted(self.rank(member) for member in members))

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return every group along `axes`; together they hold each rank exactly once."""
        free = tuple(axes)
        seen: set[int] = set()
        found: list[tuple[int, ...]] = []
        for rank in range(self.num_ranks):
            if rank not in seen:
                found.append(self.group_of(rank, free))
                seen.update(found[-1])
        return tuple(found)

    def sizes(self) -> Mapping[str, int]:
        """Return the axes with their sizes, in the order of `AXES`."""
        return {axis: self.size(axis) for axis in AXES}
