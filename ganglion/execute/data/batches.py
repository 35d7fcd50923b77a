"""Batches: one rank's share of every step as stacked tensors, the next one read ahead.

consumer   | step 0 ........ | step 1 ........ | step 2
thread     | read 1 | idle   | read 2 | idle   | read 3
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ganglion.errors import DataError
from ganglion.execute.data.datasets import MapDataset, Sample, Subset
from ganglion.execute.data.sampler import Sampler


class Batches:
    """Endless batches of one share; a batch depends on its step only.

    Every iterator begins at `first_step` and reads one batch ahead in a thread of its own. The
    thread ends when the iterator is dropped, fails or is closed.
    """

    def __init__(
        self,
        dataset: MapDataset,
        sampler: Sampler,
        share_index: int,
        num_shares: int,
        first_step: int = 0,
    ) -> None:
        if sampler.num_samples != len(dataset):
            raise DataError(
                f"the sampler is made for {sampler.num_samples} samples, but the data set has "
                f"{len(dataset)}: make it with num_samples={len(dataset)}"
            )
        # Refuses a batch that cannot be shared evenly.
        sampler.share(first_step, share_index, num_shares)
        self._dataset = dataset
        self._sampler = sampler
        self._share_index = share_index
        self._num_shares = num_shares
        self._first_step = first_step
        self._iterators: weakref.WeakSet[Generator[Sample, None, None]] = weakref.WeakSet()

    def at(self, step: int) -> Sample:
        """Return the inputs and targets of one step."""
        indices = self._sampler.share(step, self._share_index, self._num_shares).tolist()
        return read_batch(self._dataset, indices)

    def __iter__(self) -> Iterator[Sample]:
        """Return a new iterator over the steps from `first_step` on."""
        iterator = self._read_ahead()
        self._iterators.add(iterator)
        return iterator

    def close(self) -> None:
        """End every iterator and its thread."""
        for iterator in list(self._iterators):
            iterator.close()

    def _read_ahead(self) -> Generator[Sample, None, None]:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ganglion-batches")
        reader = pool.submit(threading.get_ident).result()
        try:
            pending = pool.submit(self.at, self._first_step)
            for step in itertools.count(self._first_step + 1):
                batch = pending.result()
                pending = pool.submit(self.at, step)
                yield batch
        finally:
            # Garbage may be collected in the reader, and a thread cannot wait for itself.
            pool.shutdown(wait=threading.get_ident() != reader, cancel_futures=True)


def read_batch(dataset: MapDataset, indices: Sequence[int]) -> Sample:
    """Return some samples stacked; refuse samples of different shapes."""
    inputs, targets = zip(*(read_sample(dataset, i) for i in indices), strict=True)
    names = [_name_of(dataset, index) for index in indices]
    return _stack(inputs, names, "input"), _stack(targets, names, "target")


def read_sample(dataset: MapDataset, index: int) -> Sample:
    """Return a sample as a pair of tensors; refuse any other."""
    sample, name = dataset[index], _name_of(dataset, index)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
        raise DataError(
            f"{name} is a {type(sample).__name__}{size}, not a pair (input, target): "
            f"return both from __getitem__"
        )
    return _as_tensor(sample[0], name, "input"), _as_tensor(sample[1], name, "target")


def _name_of(dataset: MapDataset, index: int) -> str:
    """Return the name of a sample, by its index in the user's data set before the split."""
    number = dataset.origin(index) if isinstance(dataset, Subset) else index
    return f"sample {number} of data.source"


def _as_tensor(value: Any, name: str, part: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the {part} of {name} is a {type(value).__name__}, not a tensor, an array or a number "
            f"({error}): convert it in __getitem__"
        ) from error


def _stack(parts: tuple[Tensor, ...], names: list[str], part: str) -> Tensor:
    first = parts[0]
    for other, name in zip(parts, names, strict=True):
        if other.shape != first.shape or other.dtype != first.dtype:
            raise DataError(
                f"the {part} of {name} is {other.dtype} of shape {tuple(other.shape)}, that of "
                f"{names[0]} is {first.dtype} of shape {tuple(first.shape)}: a batch needs "
                f"samples of one shape and type"
            )
    return torch.stack(parts)
