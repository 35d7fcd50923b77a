"""Shared-memory collectives between real processes: the same bits, real overlap, real deaths."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm import MAX, SUM, World
from ganglion.execute.comm.shm.group import ShmGroup
from ganglion.execute.comm.shm.group_links import GroupLinks
from ganglion.execute.comm.shm.unix_mesh import connect_mesh
from tests.single.comm.test_shm_group_parts import (
    DTYPES,
    KINDS,
    SMALL_SLOT,
    Step,
    contribution,
    expected,
    holdings,
    plain,
    same_bits,
    start,
)
from tests.support.harness import DEADLINE_S, RankFailed, RankPool, Ranks

pytestmark = pytest.mark.timeout(110)

_numbers = itertools.count()  # of meshes made by this process: the same on every rank


def mesh(world: World) -> Any:
    """Return sockets to all other ranks, which meet through torch's store."""
    store, number = dist.distributed_c10d._get_default_store(), next(_numbers)

    def exchange(text: str) -> list[str]:
        store.set(f"shm/{number}/{world.rank}", text)
        return [store.get(f"shm/{number}/{r}").decode() for r in range(world.num_ranks)]

    return connect_mesh(world.rank, range(world.num_ranks), exchange, 30.0)


def make_group(world: World, timeout_s: float = 30.0, **sizes: int) -> ShmGroup:
    ranks = tuple(range(world.num_ranks))
    return ShmGroup(ranks, world.rank, mesh(world), mesh(world), timeout_s, **sizes)


def sweep(world: World) -> list[str]:
    """Run every collective on every dtype and size; return what was not bitwise as it should."""
    group, wrong = make_group(world), []
    shapes = [(1, False), (7, False), (1009, True), (70_003, False), (70_003, True)]
    steps = [
        Step(0, kind, dtype, op, size, 1, (shared,) * group.size, 0)
        for dtype, (size, shared), op, kind in itertools.product(DTYPES, shapes, (SUM, MAX), KINDS)
    ]
    for kind in KINDS:  # nothing at all, and several slabs
        steps.append(Step(0, kind, torch.float32, SUM, 0, 1, (False,) * group.size, 0))
        steps.append(Step(0, kind, torch.float32, SUM, 700_001, 1, (False,) * group.size, 1))
        steps.append(Step(0, kind, torch.float32, SUM, 700_001, 1, (True,) * group.size, 1))
    for step in steps:
        handle, result = start(step, group)
        handle.wait()
        if not same_bits(result, expected(step, group.index, group.size)):
            wrong.append(str(step))
    group.barrier()
    group.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_results_are_bitwise_those_of_a_plain_sum(ranks: Ranks, num_ranks: int) -> None:
    assert ranks.run(num_ranks, sweep) == [[]] * num_ranks


def interleaved(world: World, program: list[Step], seed: int) -> list[str]:
    """Start collectives of two groups with pauses, wait for them in an order of this rank."""
    groups = [make_group(world, slot_bytes=SMALL_SLOT, eager_bytes=2000) for _ in range(2)]
    rng, wrong = random.Random(seed + world.rank), []
    started = []
    for step in program:
        started.append((step, *start(step, groups[step.group])))
        time.sleep(rng.choice([0, 0, 0.002]))
    rng.shuffle(started)
    for step, handle, result in started:
        handle.wait()
        if not same_bits(result, expected(step, world.rank, world.num_ranks)):
            wrong.append(str(step))
    for group in groups:
        group.barrier()
        group.close()
    return wrong


steps = st.builds(
    Step,
    group=st.integers(0, 1),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from([SUM, MAX]),
    size=st.one_of(st.integers(0, 9), st.integers(10, 9000)),
    root=st.integers(0, 2),
    shared=st.sampled_from([(False,) * 3, (True,) * 3, (True, False, True)]),
    seed=st.integers(0, 5),
)


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """Ranks that hypothesis can use again for each example."""
    pool = RankPool(3)
    yield pool
    pool.close()


@settings(max_examples=12)
@given(program=st.lists(steps, min_size=4, max_size=14), seed=st.integers(0, 10**6))
def test_any_interleaving_whatever_the_timing(three: RankPool, program: Any, seed: int) -> None:
    assert three.run(interleaved, (program, seed), DEADLINE_S) == [[], [], []]


def overlapped(world: World) -> tuple[float, float | None]:
    """Compute, without waiting, until a started collective is over."""
    group, size = make_group(world), 4_000_000
    tensor = contribution(world.rank, size, torch.float32)
    matrix = torch.rand(200, 200)
    handle = group.all_reduce(tensor)
    end_s = time.perf_counter() + 40
    while handle.finished_s is None and time.perf_counter() < end_s:
        matrix = (matrix @ matrix).softmax(0)
    finished_s = handle.finished_s
    parts = [contribution(rank, size, torch.float32) for rank in range(world.num_ranks)]
    assert same_bits(tensor, plain(parts, SUM))
    group.barrier()
    group.close()
    return float(matrix.sum()), finished_s


def test_a_started_collective_ends_while_the_caller_computes(ranks: Ranks) -> None:
    for _, finished_s in ranks.run(2, overlapped):
        assert finished_s is not None


def killed(world: World, size: int, when: str) -> None:
    """Rank 1 is killed; every survivor fails with what it saw, and how long that took."""
    group = make_group(world, timeout_s=100.0, slot_bytes=SMALL_SLOT)
    group.all_reduce(torch.ones(size)).wait()
    if world.rank == 1:
        if when == "midway":
            count = itertools.count()
            real = GroupLinks.synchronize

            def dying(self: GroupLinks, what: object) -> None:
                if next(count) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(self, what)

            GroupLinks.synchronize = dying  # type: ignore[method-assign]
            group.all_reduce(torch.ones(size)).wait()
        time.sleep(0.3)  # let the others get to where they wait
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.perf_counter()
    try:
        group.all_reduce(torch.ones(size)).wait()
    except PeerLost as error:
        text = str(error)
    took_s = time.perf_counter() - start_s
    try:
        group.barrier()
    except PeerLost:
        raise RuntimeError(f"survivor {world.rank} after {took_s:.3f} s: {text}") from None


@pytest.mark.parametrize(
    ("size", "when"), [(5, "before"), (300_000, "before"), (300_000, "midway")]
)
def test_survivors_of_a_killed_member_know_before_the_deadline(size: int, when: str) -> None:
    with pytest.raises(RankFailed) as failure:
        Ranks().run(3, killed, size, when)
    what = re.escape(f"all_reduce(sum) of {size} float32 of ranks [0, 1, 2] lost rank 1: it died")
    found = re.findall(rf"survivor (\d) after ([\d.]+) s: {what}", str(failure.value))
    assert {rank for rank, _ in found} == {"0", "2"}
    assert all(float(took_s) < 50.0 for _, took_s in found)  # their deadline is 100 s


def forgotten(world: World) -> None:
    """Rank 1 fails, and drops its group without closing it."""
    group = make_group(world, timeout_s=100.0)
    group.barrier()
    if world.rank == 1:
        raise ValueError("broken on purpose")
    group.all_reduce(torch.ones(100_000)).wait()


def test_a_member_that_drops_its_group_is_named() -> None:
    with pytest.raises(RankFailed, match=r"lost rank 1: it closed the group"):
        Ranks().run(2, forgotten)


def disagreeing(world: World, sizes: tuple[int, ...]) -> str:
    group = make_group(world)
    text = ""
    try:
        group.all_reduce(torch.zeros(sizes[world.rank])).wait()
    except ProtocolError as error:
        text = str(error)
    world.barrier()
    group.close()
    return text


@pytest.mark.parametrize(
    "sizes", [(3, 4, 3), (100_000, 3, 3), (100_000, 100_000, 100_001)], ids=str
)
def test_disagreeing_ranks_are_told_what_each_called(ranks: Ranks, sizes: Any) -> None:
    called = {rank: f"all_reduce(sum) of {size} float32" for rank, size in enumerate(sizes)}
    for text in ranks.run(3, disagreeing, sizes):
        assert str(called) in text


def silence(world: World, size: int) -> str:
    group = make_group(world, timeout_s=0.5)
    text = ""
    if world.rank == 0:
        try:
            group.all_reduce(torch.zeros(size)).wait()
        except PeerLost as error:
            text = str(error)
    world.barrier()
    group.close()
    return text


@pytest.mark.parametrize("size", [5, 100_000])
def test_a_silent_rank_is_lost_at_the_deadline(ranks: Ranks, size: int) -> None:
    text = ranks.run(2, silence, size)[0]
    assert f"all_reduce(sum) of {size} float32 of ranks [0, 1] waited 0.5 s for ranks [1]" in text


def many_groups(world: World) -> bool:
    def once() -> None:
        group = make_group(world, slot_bytes=SMALL_SLOT)
        group.all_reduce(group.allocate(20_000, torch.float32).fill_(1)).wait()
        group.all_reduce(torch.ones(20_000)).wait()
        group.barrier()
        group.close()
        try:
            group.barrier()
        except CommError:
            return
        raise AssertionError("a closed group was of use")

    once()
    before = holdings()
    for _ in range(100):
        once()
    return holdings() == before


def test_a_hundred_groups_leak_nothing(ranks: Ranks) -> None:
    assert ranks.run(2, many_groups) == [True, True]
