"""The memory of a centre without locks, which all workers of a host write.

    | head | counts, one a worker | first values and summed additions of a sample | weights |

The workers are threads of one process that owns the memory, or processes that map a file. Two
additions at the same moment may lose a word of one of them; the sample estimates the loss.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from ganglion.errors import ConfigError, PeerLost, ProtocolError

_MAGIC = 0x474E_484F_4757_0001
_DTYPES = (torch.float32, torch.float64)
_HEAD = 4  # numbers: magic, dtype, workers, elements
_ALIGN = 64
_MAX_SAMPLE = 4096
_RETRY_S = 0.01


class SharedCenter:
    """The centre, a counter for each worker, and a sample of elements whose additions are summed.

    Make it with `in_process`, `create` or `attach`.
    """

    def __init__(self, memory: Tensor) -> None:
        head = memory[: 8 * _HEAD].view(torch.int64)
        magic, dtype, num_workers, numel = head.tolist()
        if magic != _MAGIC:
            raise ProtocolError(
                "this memory holds no centre: give all workers the path that create() was given, "
                "and run one version of Ganglion"
            )
        self.num_workers: int = num_workers
        self.numel: int = numel
        self.dtype = _DTYPES[dtype]
        sample = min(numel, _MAX_SAMPLE)
        places = _places_of(num_workers, numel, _DTYPES[dtype])
        self._counts = _view(memory, places[0], torch.int64, num_workers)
        self._first = _view(memory, places[1], torch.float64, sample)
        self._added = _view(memory, places[2], torch.float64, num_workers * sample)
        self._added = self._added.view(num_workers, sample)
        self.flat = _view(memory, places[3], _DTYPES[dtype], numel)
        self._sampled = _sampled_of(numel)

    @classmethod
    def in_process(cls, first: Tensor, num_workers: int) -> SharedCenter:
        """Return a centre at `first` for threads of this process."""
        memory = torch.zeros(_size_of(num_workers, first), dtype=torch.uint8)
        return cls(_prepare(memory, first, num_workers))

    @classmethod
    def create(cls, path: Path, first: Tensor, num_workers: int) -> SharedCenter:
        """Return a centre at `first` in a file that processes attach to, best in /dev/shm.

        The caller removes the file.
        """
        size = _size_of(num_workers, first)
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk kills the process
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(
                f"no room for a shared centre of {size} bytes at {path} ({error}): name a path "
                f"with more room"
            ) from error
        center = cls(_prepare(_map(partial), first, num_workers))
        partial.replace(path)
        return center

    @classmethod
    def attach(cls, path: Path, timeout_s: float = 60.0) -> SharedCenter:
        """Return the centre that another process creates at `path`."""
        end_s = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() >= end_s:
                raise PeerLost(
                    f"no centre appeared at {path} within {timeout_s:g} s: look for the first "
                    f"error of the process that creates it"
                )
            time.sleep(_RETRY_S)
        return cls(_map(path))

    @property
    def version(self) -> int:
        """The number of additions of all workers."""
        return int(self._counts.sum())

    def read(self, out: Tensor) -> None:
        """Copy the weights, even while others write them."""
        out.copy_(self.flat)

    def add(self, worker: int, delta: Tensor) -> None:
        """Add without a lock, and count it."""
        self._write(delta)
        self._added[worker] += delta[self._sampled]
        self._counts[worker] += 1

    def lost_update(self) -> float:
        """Return an estimate of |sum of additions - change of the centre|, best between writes.

        It is exact, except for rounding, for centres of up to 4096 elements.
        """
        changed = self.flat[self._sampled].double() - self._first
        lost = torch.linalg.vector_norm(self._added.sum(0) - changed)
        return float(lost) * math.sqrt(self.flat.numel() / len(self._sampled))

    def restart(self, first: Tensor) -> None:
        """Set the centre to `first`; no worker may write meanwhile."""
        self.flat.copy_(first)
        self._first.copy_(self.flat[self._sampled])
        self._added.zero_()

    def _write(self, delta: Tensor) -> None:
        self.flat.add_(delta)


def _sampled_of(numel: int) -> Tensor:
    """Return the sampled elements: evenly spread, so that no lost block is missed."""
    sample = min(numel, _MAX_SAMPLE)
    return torch.arange(sample) * numel // sample


def _places_of(num_workers: int, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the offsets of counts, first sample, summed samples and weights, and the end."""
    sample = min(numel, _MAX_SAMPLE)
    sizes = (
        8 * _HEAD,
        8 * num_workers,
        8 * sample,
        8 * num_workers * sample,
        numel * dtype.itemsize,
    )
    ends, end = [], 0
    for size in sizes:
        end += -(-size // _ALIGN) * _ALIGN
        ends.append(end)
    return tuple(ends)


def _size_of(num_workers: int, first: Tensor) -> int:
    """Return the size of the memory of a centre, in bytes."""
    if num_workers < 1 or first.dtype not in _DTYPES:
        raise ConfigError(
            f"num_workers = {num_workers} and a centre of {first.dtype} cannot be shared: give 1 "
            f"worker or more, and float32 or float64"
        )
    return _places_of(num_workers, first.numel(), first.dtype)[-1]


def _view(memory: Tensor, begin: int, dtype: torch.dtype, numel: int) -> Tensor:
    return memory[begin : begin + numel * dtype.itemsize].view(dtype)


def _prepare(memory: Tensor, first: Tensor, num_workers: int) -> Tensor:
    """Write the head and the first weights into zeroed memory; return it."""
    numbers = [_MAGIC, _DTYPES.index(first.dtype), num_workers, first.numel()]
    memory[: 8 * _HEAD].view(torch.int64).copy_(torch.tensor(numbers))
    SharedCenter(memory).restart(first)
    return memory


def _map(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
