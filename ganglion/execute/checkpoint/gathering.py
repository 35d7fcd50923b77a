"""Whole tensors from pieces: one member of a group puts together what the others hold.

A piece at a time is on its way, so nobody but the first member ever holds a whole model, and that
one holds it in host memory. What several members hold is sent once, and not at all if the first
member has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.decide.topology import Box
from ganglion.execute.checkpoint.pieces import Piece, Saveable
from ganglion.execute.comm import Group, broadcast_text


class _Note(NamedTuple):
    """What a member tells of one piece."""

    name: str
    dtype: str
    whole_shape: tuple[int, ...]
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def gather_whole(
    held: Mapping[str, Saveable], group: Group, device: torch.device
) -> dict[str, Tensor] | None:
    """Return all members' tensors, whole, to the first member and None to others; collective.

    What the first member holds whole and on the host is returned itself, not a copy. `device` is
    where pieces are received.
    """
    pieces = {name: Piece.of(value) for name, value in held.items()}
    whole = _Whole()
    for place, note in _first_holders(pieces, group):
        piece = pieces[note.name] if group.index == place else None
        if place > 0:
            piece = _received(piece, note, group, place, device)
        if group.index == 0:
            assert piece is not None
            whole.put(note.name, piece)
    return whole.tensors() if group.index == 0 else None


class _Whole:
    """Tensors that are being put together."""

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
    """Yield every different piece with the first member that holds it; the same everywhere."""
    seen: set[tuple[str, tuple[Box, ...]]] = set()
    for place in range(group.size):
        told = _told(pieces) if group.index == place else ""
        for note in _heard(broadcast_text(group, told, place)):
            if (note.name, note.boxes) not in seen:
                seen.add((note.name, note.boxes))
                yield place, note


def _received(
    mine: Piece | None, note: _Note, group: Group, place: int, device: torch.device
) -> Piece:
    """Return the piece of another member, which sends its own."""
    if mine is None:
        buffer = torch.empty(note.shape, dtype=getattr(torch, note.dtype), device=device)
    else:
        buffer = mine.tensor.detach().contiguous()
    group.broadcast(buffer, place).wait()
    return Piece(buffer, note.whole_shape, note.boxes)


def _told(pieces: Mapping[str, Piece]) -> str:
    notes = [
        (name, str(p.dtype).removeprefix("torch."), p.shape, tuple(p.tensor.shape), p.boxes)
        for name, p in pieces.items()
    ]
    return json.dumps(notes)


def _heard(text: str) -> Iterator[_Note]:
    for name, dtype, whole_shape, shape, boxes in json.loads(text):
        found = tuple(Box(*(tuple(numbers) for numbers in box)) for box in boxes)
        yield _Note(name, dtype, tuple(whole_shape), tuple(shape), found)
