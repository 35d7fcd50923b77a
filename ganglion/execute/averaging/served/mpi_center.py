"""The memory of a centre without locks, at one rank of MPI: the others reach into it.

    rank 0            | head | counts | sample | weights |   a window of MPI
    worker, any rank   Get weights --> force --> Accumulate (or Get, add, Put)

Accumulate is atomic word by word, so nothing is lost. Get, add and Put is the true Hogwild: what
others add between the Get and the Put is lost, and measured. Between hosts an MPI library may need
a thread of its own at rank 0 to let the others in (MPICH: MPIR_CVAR_ASYNC_PROGRESS=1).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ganglion.errors import CommError
from ganglion.execute.averaging.methods import SharedCenter, places_of, prepare, sampled_of, size_of
from ganglion.execute.comm.mpi import load_mpi

_ROOT = 0


class WindowCenter:
    """A centre at rank 0 of MPI's world, as HogwildEasgd and HogwildSgd use it."""

    def __init__(self, first: Tensor, num_workers: int, *, is_atomic: bool = True) -> None:
        """Open the window; all processes of mpiexec call this, and rank 0's `first` counts."""
        mpi = load_mpi()
        self._mpi = mpi
        self._is_atomic = is_atomic
        self._comm = mpi.COMM_WORLD.Dup()
        self.num_workers, self.numel, self.dtype = num_workers, first.numel(), first.dtype
        size = size_of(num_workers, first)
        self._places = places_of(num_workers, self.numel, self.dtype)
        is_root = self._comm.Get_rank() == _ROOT
        self._window = mpi.Win.Allocate(size if is_root else 0, 1, comm=self._comm)
        if is_root:
            memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)
            prepare(memory.zero_(), first, num_workers)
        self._sampled = sampled_of(self.numel)
        self._added = torch.zeros(len(self._sampled), dtype=torch.float64)  # this worker's own
        self._kind = mpi.FLOAT if first.dtype == torch.float32 else mpi.DOUBLE
        self._scratch = torch.empty_like(first)
        self._comm.Barrier()
        self._window.Lock_all()

    @property
    def version(self) -> int:
        """How many additions were made, by all workers."""
        counts = torch.empty(self.num_workers, dtype=torch.int64)
        self._get(counts, self._places[0])
        return int(counts.sum())

    def read(self, out: Tensor) -> None:
        """Copy the weights, whoever may be writing them."""
        self._get(out, self._places[3])

    def add(self, worker: int, delta: Tensor) -> None:
        """Add without a lock, and count it."""
        if self._is_atomic:
            self._accumulate(delta, self._places[3], self._kind)
        else:
            self.read(self._scratch)
            self._between()
            self._put(self._scratch.add_(delta), self._places[3])
        self._added += delta[self._sampled]
        row = len(self._sampled) * 8 * worker
        self._put(self._added, self._places[2] + row)
        one = torch.ones(1, dtype=torch.int64)
        self._accumulate(one, self._places[0] + 8 * worker, self._mpi.INT64_T)

    def lost_update(self) -> float:
        """Estimate |sum of additions - change of the centre|, best while nobody writes."""
        sample = len(self._sampled)
        first = torch.empty(sample, dtype=torch.float64)
        added = torch.empty(self.num_workers, sample, dtype=torch.float64)
        now = torch.empty(self.numel, dtype=self.dtype)
        self._get(first, self._places[1])
        self._get(added, self._places[2])
        self.read(now)
        lost = torch.linalg.vector_norm(added.sum(0) - (now[self._sampled].double() - first))
        return float(lost) * math.sqrt(self.numel / sample)

    def restart(self, first: Tensor) -> None:
        """Put the centre at `first`, while nobody writes it."""
        if self._comm.Get_rank() != _ROOT:
            raise CommError("only rank 0, which holds the centre, can put it back: load it there")
        SharedCenter(torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)).restart(first)
        self._added.zero_()

    def memory(self) -> Tensor | None:
        """Have none: it is MPI's."""
        return None

    def close(self) -> None:
        """Close the window; all processes call this together."""
        self._window.Unlock_all()
        self._window.Free()
        self._comm.Free()

    def _between(self) -> None:
        """Do nothing between a Get and its Put; a test stretches this moment."""

    def _get(self, out: Tensor, place: int) -> None:
        data = _bytes_of(out)
        self._window.Get([data, self._mpi.BYTE], _ROOT, (place, len(data), self._mpi.BYTE))
        self._window.Flush(_ROOT)

    def _put(self, source: Tensor, place: int) -> None:
        data = _bytes_of(source)
        self._window.Put([data, self._mpi.BYTE], _ROOT, (place, len(data), self._mpi.BYTE))
        self._window.Flush(_ROOT)

    def _accumulate(self, source: Tensor, place: int, kind: Any) -> None:
        target = (place, source.numel(), kind)
        self._window.Accumulate([source.numpy(), kind], _ROOT, target, op=self._mpi.SUM)
        self._window.Flush(_ROOT)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
