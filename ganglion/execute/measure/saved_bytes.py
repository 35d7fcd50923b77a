"""How many bytes autograd keeps for backward: counted while tensors are saved and let go.

Every saved tensor is put into a holder that dies with its node of the graph, so what is alive is
known at every moment. What is saved while a backward runs is the inside of a recomputed block.

The counting costs a call for each saved tensor: it is for the first steps of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_NO_BACKWARD = -1


class SavedBytes:
    """The memory that autograd keeps now, each piece once, and the most it kept.

    `live_peak` is of forwards, `again_peak` of what was computed again in a backward.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Count nothing yet; `known` tensors, such as weights, are counted elsewhere."""
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._pieces: dict[int, _Piece] = {}
        self._now = {True: 0, False: 0}
        self.live_peak = self.again_peak = 0
        self.is_on = True

    @property
    def num_bytes(self) -> int:
        """What is kept now."""
        return sum(self._now.values())

    def watching(self) -> AbstractContextManager[object]:
        """Return the context in which a training step is counted."""
        if not self.is_on:
            return nullcontext()
        return saved_tensors_hooks(self._pack, lambda holder: holder.tensor)

    def _pack(self, tensor: Tensor) -> _Holder:
        return _Holder(self, tensor, torch._C._current_graph_task_id() != _NO_BACKWARD)

    def add(self, place: int, num_bytes: int, *, is_again: bool) -> None:
        """Note that one more holder has a piece of memory."""
        if place in self._known:
            return
        piece = self._pieces.setdefault(place, _Piece(num_bytes, is_again))
        piece.num_holders += 1
        if piece.num_holders == 1:
            self._now[is_again] += num_bytes
            self.live_peak = max(self.live_peak, self._now[False])
            self.again_peak = max(self.again_peak, self._now[True])

    def remove(self, place: int) -> None:
        """Note that a holder is gone."""
        if place in self._known:
            return
        piece = self._pieces[place]
        piece.num_holders -= 1
        if piece.num_holders == 0:
            del self._pieces[place]
            self._now[piece.is_again] -= piece.num_bytes


@dataclass(slots=True)
class _Piece:
    """A piece of memory, and whether it was made while a backward ran."""

    num_bytes: int
    is_again: bool
    num_holders: int = 0


class _Holder:
    """One saved tensor."""

    __slots__ = ("_owner", "_place", "tensor")

    def __init__(self, owner: SavedBytes, tensor: Tensor, is_again: bool) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._owner, self._place = tensor, owner, storage.data_ptr()
        owner.add(self._place, storage.nbytes(), is_again=is_again)

    def __del__(self) -> None:
        self._owner.remove(self._place)
