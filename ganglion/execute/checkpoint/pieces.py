"""Pieces: the part of a tensor that one rank holds, described by boxes of the whole.

    rows of the whole    0 1 2 3   4 5 6 7     two sections, each cut over x = 2
    x = 0                0 1       4 5         its tensor has 4 rows: two boxes
    x = 1                    2 3       6 7

A box gives the position of a region in the whole and in the rank's tensor. Boxes are written and
read, so a checkpoint can be loaded in another layout than it was saved in. `gather_whole` puts the
pieces of all ranks together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.decide.topology import Box, Coordinates, Mesh, Placement
from ganglion.execute.comm import Group, broadcast_text


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """This rank's part of a tensor whose whole has `shape`; the boxes fill `tensor`."""

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
        """Return the region of this rank's tensor that a box describes, as a view."""
        return self.tensor.detach()[box.in_piece]

    def part_at(self, start: Sequence[int] | None) -> Tensor:
        """Return the region of the box that begins at `start` in the whole."""
        assert start is not None, "regions of a piece are identified by their start"
        return self.part(next(box for box in self.boxes if box.start == tuple(start)))


Saveable = Tensor | Piece


@dataclass(frozen=True, slots=True)
class RankPlacements:
    """The placements of this rank's parameters; a parameter without one is held whole."""

    placements: Mapping[str, Placement]
    mesh: Mesh
    coordinates: Coordinates

    def piece(self, name: str, tensor: Tensor) -> Saveable:
        """Return the piece that `tensor` is, cut like the parameter of that name."""
        placement = self.placements.get(name)
        if placement is None or not self.is_cut(name):
            return tensor
        boxes = placement.boxes(self.mesh, self.coordinates)
        return Piece(tensor, placement.shape, tuple(boxes))

    def is_cut(self, name: str) -> bool:
        """Return whether this rank holds less than all of a parameter."""
        placement = self.placements.get(name)
        return placement is not None and placement.local_shape(self.mesh) != placement.shape

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole parameter, of which this rank holds `tensor`."""
        placement = self.placements.get(name)
        return tuple(tensor.shape) if placement is None else placement.shape


class _Note(NamedTuple):
    """The description of one piece that a member sends."""

    name: str
    dtype: str
    whole_shape: tuple[int, ...]
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def gather_whole(
    held: Mapping[str, Saveable], group: Group, device: torch.device
) -> dict[str, Tensor] | None:
    """Return all members' tensors, whole, to the first member and None to others; collective.

    One piece at a time is sent, so only the first member ever holds a whole model, and in host
    memory. A piece that several hold is sent once, and not at all if the first member has it; one
    that it holds whole on the host is returned itself, not a copy. `device` receives the pieces.
    """
    pieces = {name: Piece.of(value) for name, value in held.items()}
    whole = _Whole()
    for member, note in _first_holders(pieces, group):
        piece = pieces[note.name] if group.index == member else None
        if member > 0:
            piece = _received(piece, note, group, member, device)
        if group.index == 0:
            assert piece is not None
            whole.put(note.name, piece)
    return whole.tensors() if group.index == 0 else None


class _Whole:
    """Whole tensors that are filled piece by piece."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._num_missing: dict[str, int] = {}

    def put(self, name: str, piece: Piece) -> None:
        if piece.tensor.shape == piece.shape and piece.tensor.device.type == "cpu":
            self._tensors[name] = piece.tensor
            return
        if name not in self._tensors:
            self._tensors[name] = torch.empty(piece.shape, dtype=piece.dtype)
            self._num_missing[name] = self._tensors[name].numel()
        for box in piece.boxes:
            self._tensors[name][box.in_whole] = piece.part(box)
        self._num_missing[name] -= piece.tensor.numel()

    def tensors(self) -> dict[str, Tensor]:
        for name, num_missing in self._num_missing.items():
            assert num_missing == 0, f"{num_missing} elements of {name} are held by nobody"
        return self._tensors


def _first_holders(pieces: Mapping[str, Piece], group: Group) -> Iterator[tuple[int, _Note]]:
    """Yield every different piece with the first member that holds it; collective."""
    seen: set[tuple[str, tuple[Box, ...]]] = set()
    for member in range(group.size):
        mine = _notes_to_json(pieces) if group.index == member else ""
        for note in _notes_from_json(broadcast_text(group, mine, member)):
            if (note.name, note.boxes) not in seen:
                seen.add((note.name, note.boxes))
                yield member, note


def _received(
    mine: Piece | None, note: _Note, group: Group, member: int, device: torch.device
) -> Piece:
    """Broadcast the piece of one member, and return it."""
    if mine is None:
        buffer = torch.empty(note.shape, dtype=getattr(torch, note.dtype), device=device)
    else:
        buffer = mine.tensor.detach().contiguous()
    group.broadcast(buffer, member).wait()
    return Piece(buffer, note.whole_shape, note.boxes)


def _notes_to_json(pieces: Mapping[str, Piece]) -> str:
    notes = [
        (name, str(p.dtype).removeprefix("torch."), p.shape, tuple(p.tensor.shape), p.boxes)
        for name, p in pieces.items()
    ]
    return json.dumps(notes)


def _notes_from_json(text: str) -> Iterator[_Note]:
    for name, dtype, whole_shape, shape, boxes in json.loads(text):
        found = tuple(Box(*(tuple(numbers) for numbers in box)) for box in boxes)
        yield _Note(name, dtype, tuple(whole_shape), tuple(shape), found)
