"""The memory of a centre without locks: weights that all workers of a host write at will.

    | head | counts, one a worker | first values and summed additions of a sample | weights |

The memory belongs to one process, whose threads are the workers, or is a file that processes map.
Two additions at the same moment may lose a word of one of them; the sample tells how much was lost.
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
        """Look at `memory`, which begins with what it holds."""
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
        """Begin at the weights `first`, for threads of this process."""
        memory = torch.zeros(_size_of(num_workers, first), dtype=torch.uint8)
        return cls(_prepare(memory, first, num_workers))

    @classmethod
    def create(cls, path: Path, first: Tensor, num_workers: int) -> SharedCenter:
        """Begin at `first` in a file that processes of this host attach to, best in /dev/shm.

        Whoever creates the file removes it.
        """
        size = _size_of(num_workers, first)
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk is a killed process
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
        """Map the centre that another process creates at `path`."""
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
        """How many additions were made, by all workers."""
        return int(self._counts.sum())

    def read(self, out: Tensor) -> None:
        """Copy the weights, whoever may be writing them."""
        out.copy_(self.flat)

    def add(self, worker: int, delta: Tensor) -> None:
        """Add without a lock, and count it."""
        self._write(delta)
        self._added[worker] += delta[self._sampled]
        self._counts[worker] += 1

    def lost_update(self) -> float:
        """Estimate |sum of additions - change of the centre|, best while nobody writes.

        It is exact, but for rounding, for centres of up to 4096 elements.
        """
        changed = self.flat[self._sampled].double() - self._first
        lost = torch.linalg.vector_norm(self._added.sum(0) - changed)
        return float(lost) * math.sqrt(self.flat.numel() / len(self._sampled))

    def restart(self, first: Tensor) -> None:
        """Put the centre at `first`, while nobody writes it."""
        self.flat.copy_(first)
        self._first.copy_(self.flat[self._sampled])
        self._added.zero_()

    def _write(self, delta: Tensor) -> None:
        self.flat.add_(delta)


def _sampled_of(numel: int) -> Tensor:
    """Return which elements are sampled: evenly spread, so that no lost block is missed."""
    sample = min(numel, _MAX_SAMPLE)
    return torch.arange(sample) * numel // sample


def _places_of(num_workers: int, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return where counts, first sample, summed samples and weights begin, and where all ends."""
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
    """Return how many bytes the memory of a centre takes."""
    if num_workers < 1 or first.dtype not in _DTYPES:
        raise ConfigError(
            f"num_workers = {num_workers} and a centre of {first.dtype} cannot be shared: give 1 "
            f"worker or more, and float32 or float64"
        )
    return _places_of(num_workers, first.numel(), first.dtype)[-1]


def _view(memory: Tensor, begin: int, dtype: torch.dtype, numel: int) -> Tensor:
    return memory[begin : begin + numel * dtype.itemsize].view(dtype)


def _prepare(memory: Tensor, first: Tensor, num_workers: int) -> Tensor:
    """Write the head and the first weights into memory that is zero; return it."""
    numbers = [_MAGIC, _DTYPES.index(first.dtype), num_workers, first.numel()]
    memory[: 8 * _HEAD].view(torch.int64).copy_(torch.tensor(numbers))
    SharedCenter(memory).restart(first)
    return memory


def _map(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
