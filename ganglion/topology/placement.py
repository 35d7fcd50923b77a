"""Placement: which axes split a parameter, and which hold copies whose gradients must be summed.

Metadata lives in this typed record and never in attributes of a tensor: a misspelt attribute is a
gradient that is silently not reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

from ganglion.errors import LayoutError
from ganglion.topology.mesh import AXES, Coordinates, Mesh


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor dim cut into equal pieces along one axis."""

    dim: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one parameter lives: its full shape, its cuts and the axes that hold copies of it.

    Cuts of one dim are applied in the order listed: the first makes the coarsest pieces.
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
        for shard in self.shards:
            if not 0 <= shard.dim < len(self.shape):
                raise LayoutError(f"dim {shard.dim} is outside a tensor of shape {self.shape}")

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of one rank's piece; refuse sizes that do not divide."""
        sizes = list(self.shape)
        for shard in self.shards:
            parts = mesh.size(shard.axis)
            if sizes[shard.dim] % parts:
                raise LayoutError(
                    f"dim {shard.dim} of a parameter of shape {self.shape} has {sizes[shard.dim]} "
                    f"entries, which {shard.axis}={parts} does not divide: choose a size that is "
                    f"a multiple of {parts}"
                )
            sizes[shard.dim] //= parts
        return tuple(sizes)

    def offsets(self, mesh: Mesh, coordinates: Coordinates) -> tuple[int, ...]:
        """Return where one rank's piece begins in the full parameter."""
        sizes = list(self.shape)
        starts = [0] * len(sizes)
        self.local_shape(mesh)
        for shard in self.shards:
            sizes[shard.dim] //= mesh.size(shard.axis)
            starts[shard.dim] += sizes[shard.dim] * coordinates.along(shard.axis)
        return tuple(starts)
