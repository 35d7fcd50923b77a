"""Batches: the right samples, resumable from the step alone, and no thread left behind."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ganglion.errors import DataError, LayoutError
from ganglion.execute.data import Batches, Sampler, Subset

NUM_SAMPLES = 10


class Numbered:
    """Samples that carry their own index; `on_read` sees every index asked for."""

    def __init__(self, on_read: Callable[[int], None] = lambda index: None) -> None:
        self.on_read = on_read

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.on_read(index)
        return torch.full((3,), float(index)), index


def batches_of(
    dataset: Any, global_batch_size: int = 4, share: int = 0, shares: int = 1, first_step: int = 0
) -> Batches:
    sampler = Sampler(num_samples=len(dataset), global_batch_size=global_batch_size, seed=5)
    return Batches(dataset, sampler, share, shares, first_step)


def targets_of(batches: Batches, num_steps: int) -> list[list[int]]:
    return [targets.tolist() for _, targets in itertools.islice(batches, num_steps)]


def reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("ganglion-batches")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    assert reader_threads() == []
    yield
    assert reader_threads() == []


def test_batches_hold_the_samples_of_the_sampler() -> None:
    batches = batches_of(Numbered())
    inputs, targets = batches.at(3)
    sampler = Sampler(num_samples=NUM_SAMPLES, global_batch_size=4, seed=5)
    assert targets.tolist() == sampler.share(3, 0, 1).tolist()
    assert targets.dtype == torch.int64
    assert inputs.shape == (4, 3)
    assert torch.equal(inputs[:, 0], targets.float())


def test_iterating_gives_the_steps_in_order() -> None:
    batches = batches_of(Numbered())
    assert targets_of(batches, 6) == [batches.at(step)[1].tolist() for step in range(6)]


@pytest.mark.parametrize("first_step", [1, 2, 5])
def test_resuming_needs_the_step_alone(first_step: int) -> None:
    whole = targets_of(batches_of(Numbered()), 9)
    assert (
        targets_of(batches_of(Numbered(), first_step=first_step), 9 - first_step)
        == (whole[first_step:])
    )


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 6, 12])
def test_shares_of_every_layout_join_to_the_same_batch(shares: int) -> None:
    whole = targets_of(batches_of(Numbered(), 12), 4)
    parts = [targets_of(batches_of(Numbered(), 12, share, shares), 4) for share in range(shares)]
    for step, batch in enumerate(whole):
        assert [target for part in parts for target in part[step]] == batch


def test_the_next_batch_is_read_while_this_one_is_used() -> None:
    read: list[int] = []
    ahead = threading.Event()

    def record(index: int) -> None:
        read.append(index)
        if len(read) == 8:
            ahead.set()

    iterator = iter(batches_of(Numbered(record)))
    next(iterator)
    assert ahead.wait(timeout=30)
    assert len(read) == 8
    del iterator
    gc.collect()


def test_dropping_an_iterator_half_way_ends_its_thread() -> None:
    iterator = iter(batches_of(Numbered()))
    next(iterator)
    assert len(reader_threads()) == 1
    del iterator
    gc.collect()
    assert reader_threads() == []


def test_an_iterator_dropped_inside_its_own_thread_ends_it_too() -> None:
    # Garbage collection may run in any thread, and a thread cannot wait for itself.
    read: list[int] = []
    holder: list[Any] = []
    may_drop = threading.Event()

    def drop(index: int) -> None:
        read.append(index)
        if len(read) == 5:
            may_drop.wait(timeout=30)
            holder.clear()

    holder.append(iter(batches_of(Numbered(drop))))
    next(holder[0])
    (reader,) = reader_threads()
    may_drop.set()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert holder == []


def test_close_ends_every_iterator() -> None:
    batches = batches_of(Numbered())
    iterators = [iter(batches) for _ in range(3)]
    for iterator in iterators[:2]:
        next(iterator)
    assert len(reader_threads()) == 2
    batches.close()
    assert reader_threads() == []
    assert [next(iterator, None) for iterator in iterators] == [None] * 3
    batches.close()


def test_iterators_are_independent() -> None:
    batches = batches_of(Numbered())
    assert targets_of(batches, 3) == targets_of(batches, 3)


def test_errors_of_the_reader_reach_the_consumer() -> None:
    read: list[int] = []

    def fail(index: int) -> None:
        read.append(index)
        if len(read) > 4:
            raise OSError("disk on fire")

    iterator = iter(batches_of(Numbered(fail)))
    next(iterator)
    with pytest.raises(OSError, match="disk on fire"):
        next(iterator)
    assert reader_threads() == []


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (torch.zeros(2), "sample 7 of data.source is a Tensor, not a pair"),
        ((1, 2, 3), "sample 7 of data.source is a tuple of 3, not a pair"),
        ({"input": 1}, "sample 7 of data.source is a dict, not a pair"),
        ((np.zeros(3), 0), r"input of sample 7 .* of shape \(3,\), .* of shape \(2,\)"),
        ((torch.zeros(2), 0), r"input of sample 7 .* is torch.float32 .* is torch.float64"),
        ((np.zeros(2), np.zeros(1, int)), r"target of sample 7 .* of shape \(1,\)"),
        ((np.zeros(2), "cat"), "target of sample 7 of data.source is a str"),
    ],
)
def test_odd_samples_are_refused_by_index(odd: Any, message: str) -> None:
    samples: list[Any] = [(np.zeros(2), number) for number in range(8)]
    samples[7] = odd
    sampler = Sampler(num_samples=8, global_batch_size=8, shuffle=False)
    batches = Batches(samples, sampler, 0, 1)
    with pytest.raises(DataError, match=message):
        batches.at(0)
    with pytest.raises(DataError, match=message):
        next(iter(batches))


def test_odd_samples_of_a_subset_are_named_by_their_own_index() -> None:
    subset = Subset([(0.0, 0), 1, (0.0, 0), 3], np.array([0, 2, 3]))
    batches = Batches(subset, Sampler(num_samples=3, global_batch_size=3), 0, 1)
    with pytest.raises(DataError, match=r"sample 3 of data\.source is a int"):
        batches.at(0)


def test_sampler_of_another_size_is_refused() -> None:
    sampler = Sampler(num_samples=9, global_batch_size=4)
    with pytest.raises(DataError, match="made for 9 samples, but the data set has 10"):
        Batches(Numbered(), sampler, 0, 1)


def test_batch_that_cannot_be_dealt_out_is_refused_at_once() -> None:
    with pytest.raises(LayoutError, match=r"global_batch_size = 4 .* data \* z = 3"):
        batches_of(Numbered(), shares=3)
