"""Large collectives slab by slab, through small shared memory that stays in cache.

Every member owns a staging segment of two slots. A slab of a sum is cut into one slice for each
member, which reduces it for all; for two members, slab after slab:

    rank 0   deposit slice 1 | sync | reduce slice 0, publish | sync | collect slice 1
    rank 1   deposit slice 0 | sync | reduce slice 1, publish | sync | collect slice 0

The deposit of slab k+1 comes before the second sync of slab k, so there is one sync for each slab.
Two slots are enough. A member that passed the sync of slab k knows that all have combined slab k,
so it may deposit slab k+2 over it; it publishes there only after the next sync, before which all
collect slab k. Slabs are counted over all collectives of the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ganglion.execute.comm.reduce_order import combine, combine_by_tree
from ganglion.execute.comm.shm.progress import Job

NUM_SLOTS = 2
_ALIGN_BYTES = 64


class Staging:
    """The staging memory of all members, as slots of one dtype."""

    def __init__(self, memories: list[Tensor], index: int) -> None:
        """Use `memories[i]`, the bytes of member i; this member is at position `index`."""
        self.index = index
        self.size = len(memories)
        self._memories = memories
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}

    def slots(self, dtype: torch.dtype, number: int) -> list[Tensor]:
        """Return the slot of slab `number` of each member."""
        if dtype not in self._views:
            self._views[dtype] = [
                [memory.view(dtype) for memory in slot]
                for slot in zip(*(m.chunk(NUM_SLOTS) for m in self._memories), strict=True)
            ]
        return self._views[dtype][number % NUM_SLOTS]

    def slot_elements(self, dtype: torch.dtype) -> int:
        """Return how many elements one slot holds."""
        return len(self._memories[0]) // NUM_SLOTS // dtype.itemsize

    def region_elements(self, dtype: torch.dtype) -> int:
        """Return how many elements each of `size` equal regions of a slot holds."""
        step = _ALIGN_BYTES // dtype.itemsize
        return self.slot_elements(dtype) // self.size // step * step


class Program(ABC):
    """The steps of one member for each slab; `number` counts the slabs of the group."""

    def __init__(self, job: Job, staging: Staging, slab_elements: int, num_elements: int) -> None:
        """Cut `num_elements` into slabs."""
        self._job = job
        self._staging = staging
        self._slab = slab_elements
        self.num_slabs = -(-num_elements // slab_elements)

    @abstractmethod
    def deposit(self, slab: int, number: int) -> None:
        """Fill this member's slot for the others to read."""

    @abstractmethod
    def combine(self, slab: int, number: int) -> None:
        """Read the others' deposits."""

    def collect(self, slab: int, number: int) -> None:  # noqa: B027
        """Read the results that others published in `combine`, if it did."""

    def _stretch(self, tensor: Tensor, slab: int) -> Tensor:
        return tensor[slab * self._slab : (slab + 1) * self._slab]


class SumSlabs(Program):
    """All-reduce, and reduce to a root: every member combines one slice of each slab."""

    def __init__(self, job: Job, staging: Staging) -> None:
        self._region = staging.region_elements(job.call.dtype)
        super().__init__(job, staging, self._region * staging.size, job.call.num_elements)
        self._is_target = job.call.kind == "all_reduce" or job.call.root == staging.index
        self._slices: dict[int, list[Tensor]] = {}

    def deposit(self, slab: int, number: int) -> None:
        """Copy the slices of the others."""
        slot = self._staging.slots(self._job.call.dtype, number)[self._staging.index]
        self._slices[slab] = self._cut(slab)
        for member, piece in enumerate(self._slices[slab]):
            if member != self._staging.index:
                self._place(slot, member, piece).copy_(piece)

    def combine(self, slab: int, number: int) -> None:
        """Reduce this member's slice and publish it in the region without deposits."""
        index, call = self._staging.index, self._job.call
        slots = self._staging.slots(call.dtype, number)
        mine = self._slices[slab][index]
        parts = [self._place(slot, index, mine) for slot in slots]
        total, parts[index] = parts[index], mine
        if call.kind == "reduce":
            combine_by_tree(parts, call.root, total, call.op)
        else:
            combine(parts, total, call.op)
        if self._is_target:
            mine.copy_(total)

    def collect(self, slab: int, number: int) -> None:
        """Copy the slices that the others reduced."""
        pieces = self._slices.pop(slab)
        if not self._is_target:
            return
        slots = self._staging.slots(self._job.call.dtype, number)
        for member, piece in enumerate(pieces):
            if member != self._staging.index:
                piece.copy_(self._place(slots[member], member, piece))

    def _place(self, slot: Tensor, member: int, piece: Tensor) -> Tensor:
        start = member * self._region
        return slot[start : start + piece.numel()]

    def _cut(self, slab: int) -> list[Tensor]:
        """Return one slice for each member; those of the last members may be short or empty."""
        low = slab * self._slab
        high = min(low + self._slab, self._job.call.num_elements)
        step = _ALIGN_BYTES // self._job.call.dtype.itemsize
        width = -(-(high - low) // self._staging.size // step) * step
        starts = range(low, low + width * self._staging.size, width)
        return [self._job.target[min(i, high) : min(i + width, high)] for i in starts]


class ScatterSlabs(Program):
    """Reduce-scatter: a slab holds an equal stretch of every member's part."""

    def __init__(self, job: Job, staging: Staging) -> None:
        region_elements = staging.region_elements(job.call.dtype)
        super().__init__(job, staging, region_elements, job.target.numel())
        self._parts = job.source.chunk(staging.size)

    def deposit(self, slab: int, number: int) -> None:
        """Copy a stretch of the parts of the others."""
        slot = self._staging.slots(self._job.call.dtype, number)[self._staging.index]
        for member, part in enumerate(self._parts):
            if member != self._staging.index:
                piece = self._stretch(part, slab)
                start = member * self._slab
                slot[start : start + piece.numel()].copy_(piece)

    def combine(self, slab: int, number: int) -> None:
        """Reduce this member's stretch into the output."""
        index, call = self._staging.index, self._job.call
        out = self._stretch(self._job.target, slab)
        start = index * self._slab
        parts = [
            self._stretch(self._parts[index], slab)
            if member == index
            else slot[start : start + out.numel()]
            for member, slot in enumerate(self._staging.slots(call.dtype, number))
        ]
        combine(parts, out, call.op)


class CopySlabs(Program):
    """All-gather and broadcast: members copy the deposits of others."""

    def __init__(self, job: Job, staging: Staging) -> None:
        call, size = job.call, staging.size
        gather = call.kind == "all_gather"
        super().__init__(job, staging, staging.slot_elements(call.dtype), job.source.numel())
        parts = enumerate(job.target.chunk(size)) if gather else [(call.root, job.target)]
        self._targets = dict(parts)

    def deposit(self, slab: int, number: int) -> None:
        """Copy this member's data, if it is a sender."""
        index = self._staging.index
        if index in self._targets:
            piece = self._stretch(self._job.source, slab)
            self._staging.slots(piece.dtype, number)[index][: piece.numel()].copy_(piece)

    def combine(self, slab: int, number: int) -> None:
        """Copy the data of all senders to their places."""
        slots = self._staging.slots(self._job.call.dtype, number)
        for member, target in self._targets.items():
            piece = self._stretch(target, slab)
            if member != self._staging.index:
                piece.copy_(slots[member][: piece.numel()])
            elif self._job.call.kind == "all_gather":
                piece.copy_(self._stretch(self._job.source, slab))


def program_of(job: Job, staging: Staging) -> Program:
    """Return the program for the kind of `job`."""
    if job.call.kind in ("all_reduce", "reduce"):
        return SumSlabs(job, staging)
    return (ScatterSlabs if job.call.kind == "reduce_scatter" else CopySlabs)(job, staging)
