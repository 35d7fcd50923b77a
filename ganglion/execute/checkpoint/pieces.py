"""Pieces: the part of a tensor that one rank holds, described by boxes of the whole.

    rows of the whole    0 1 2 3   4 5 6 7     two sections, each cut over x = 2
    x = 0                0 1       4 5         its tensor has 4 rows: two boxes
    x = 1                    2 3       6 7

A box says where a region lies in the whole and where in the rank's tensor. Boxes are written and
read, so the layout that loads need not be the one that saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ganglion.decide.topology import Box, Coordinates, Mesh, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What this rank holds of a tensor whose whole has `shape`; the boxes fill `tensor`."""

    tensor: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        held = sum(math.prod(box.size) for box in self.boxes)
        assert held == self.tensor.numel(), f"boxes of {held}, tensor {tuple(self.tensor.shape)}"

    @classmethod
    def of(cls, value: Saveable) -> Piece:
        """Return a value as a piece; a whole tensor is one box."""
        if isinstance(value, Piece):
            return value
        shape = tuple(value.shape)
        return cls(value, shape, (Box.whole(shape),))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the whole."""
        return self.tensor.dtype

    def part(self, box: Box) -> Tensor:
        """Return the region of this rank's tensor that a box describes, not a copy."""
        return self.tensor.detach()[box.in_piece]

    def part_at(self, start: Sequence[int] | None) -> Tensor:
        """Return the region of the box that begins at `start` in the whole."""
        assert start is not None, "regions of a piece are told apart by where they begin"
        return self.part(next(box for box in self.boxes if box.start == tuple(start)))


Saveable = Tensor | Piece


@dataclass(frozen=True, slots=True)
class Places:
    """Which part of each parameter this rank holds; a name without a placement is held whole."""

    placements: Mapping[str, Placement]
    mesh: Mesh
    coordinates: Coordinates

    def piece(self, name: str, tensor: Tensor) -> Saveable:
        """Return a tensor that is cut like the parameter of that name, with where it belongs."""
        placement = self.placements.get(name)
        if placement is None or not self.is_cut(name):
            return tensor
        boxes = placement.boxes(self.mesh, self.coordinates)
        return Piece(tensor, placement.shape, tuple(boxes))

    def is_cut(self, name: str) -> bool:
        """Say whether this rank holds less than all of a parameter."""
        placement = self.placements.get(name)
        return placement is not None and placement.local_shape(self.mesh) != placement.shape

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole parameter, of which this rank holds `tensor`."""
        placement = self.placements.get(name)
        return tuple(tensor.shape) if placement is None else placement.shape
