"""A tensor cut into one slice for each member, and the MPI calls that exchange the slices.

    scatter      member i gets slice i of everybody, to combine them
    gather_all   everybody gets the combined slices
    gather       one member gets them

Slices are of elements, whatever their number: some may be longer than others by one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from ganglion.execute.comm.mpi.blocks import Blocks

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def as_bytes(flat: Tensor) -> Bytes:
    """Return the memory of a flat tensor, whatever its dtype."""
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


class Slices:
    """The slices of one flat tensor."""

    def __init__(self, flat: Tensor, size: int, blocks: Blocks) -> None:
        """Cut `flat` into `size` slices; what others send lies in `blocks`."""
        self._flat = flat
        self._blocks = blocks
        self._bounds = [flat.numel() * i // size for i in range(size + 1)]
        item = flat.element_size()
        edges = [bound * item for bound in self._bounds]
        self._starts = edges[:-1]
        self._counts = [end - start for start, end in pairwise(edges)]

    def of(self, index: int) -> Tensor:
        """Return the slice at a position, in place."""
        return self._flat[self._bounds[index] : self._bounds[index + 1]]

    def scatter(self, comm: MPI.Intracomm, index: int) -> tuple[list[Tensor], MPI.Request]:
        """Start to collect slice `index` of every member: return the parts, and the request."""
        size = len(self._counts)
        mine = self._counts[index]
        parts = self._blocks.take(size * mine)
        request = comm.Ialltoallv(
            [as_bytes(self._flat), (self._counts, self._starts), MPI.BYTE],
            [parts.numpy(), ([mine] * size, [mine * i for i in range(size)]), MPI.BYTE],
        )
        return list(parts.view(self._flat.dtype).view(size, -1)), request

    def gather_all(self, comm: MPI.Intracomm) -> MPI.Request:
        """Start to fill every member's tensor with the slices of all."""
        return comm.Iallgatherv(MPI.IN_PLACE, self._spread())

    def gather(self, comm: MPI.Intracomm, mine: Tensor, index: int, root: int) -> MPI.Request:
        """Start to fill the tensor of the member at `root` with the slices of all."""
        target = self._spread() if index == root else None
        return comm.Igatherv([as_bytes(mine), MPI.BYTE], target, root)

    def _spread(self) -> Any:
        return [as_bytes(self._flat), (self._counts, self._starts), MPI.BYTE]
