"""Every schedule obeys the laws: for all small sizes, and whatever happens in whatever order."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ganglion.decide.schedules.pipeline import (
    SCHEDULES,
    RankSchedule,
    ScheduleOptions,
    make_schedule,
)
from ganglion.decide.schedules.pipeline.action import Action
from ganglion.decide.schedules.pipeline.laws import Case, LawBroken, Step, check_laws
from ganglion.decide.schedules.pipeline.message_driven import PRIORITIES, TwoBW
from tests.support.profiles import examples
from tests.support.random_driver import RandomDriver
from tests.support.simulated import UNIT, run

NEVER_FLUSHING = ("two_bw", "stash")
FLUSHING = tuple(name for name in SCHEDULES if name not in NEVER_FLUSHING)
SIZES = [(d, m) for d in range(1, 7) for m in range(1, 10)]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "two_bw"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_small_sizes(name: str, size: tuple[int, int]) -> None:
    num_ranks, m = size
    run(name, num_ranks, (m,))
    run(name, num_ranks, (m, 1, m))


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("limit", [1, 2, 5, 20])
def test_message_driven_with_every_setting(priority: str, limit: int) -> None:
    for num_stages, m in SIZES:
        options = ScheduleOptions(limit=limit, priority=priority)
        run("message_driven", num_stages, (m, m), options=options)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_with_any_number_of_chunks_and_microbatches(chunks: int) -> None:
    for num_ranks in range(1, 6):
        for m in (*range(1, 13), 17):
            run("interleaved", num_ranks, (m,), options=ScheduleOptions(chunks=chunks))


@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("num_stages", range(1, 7))
def test_two_bw_with_a_raised_cap(num_stages: int, extra: int) -> None:
    """The raised cap is legal for m >= d + extra: two versions suffice and nothing deadlocks."""
    for m in range(num_stages + extra, num_stages + extra + 4):
        run("two_bw", num_stages, (m, m, m + 1, m), options=ScheduleOptions(extra=extra))


# A seed stands for sizes, options, times and orders: cases cost a millisecond, not ten.
seeds = st.integers(0, 2**32)


def draw(seed: int) -> tuple[str, int, tuple[int, ...], ScheduleOptions]:
    """Return a schedule, a number of ranks, batches and options."""
    choose = random.Random(seed)
    name = choose.choice(list(SCHEDULES))
    num_ranks = choose.randint(1, 4)
    batches = tuple(choose.randint(1, 6) for _ in range(choose.randint(1, 3)))
    options = ScheduleOptions()
    if name == "message_driven":
        limit = choose.choice([None, 1, 2, 7])
        options = ScheduleOptions(limit=limit, priority=choose.choice([None, *PRIORITIES]))
    elif name == "interleaved":
        options = ScheduleOptions(chunks=choose.choice([None, 1, 3]))
    elif name == "two_bw":
        options = ScheduleOptions(extra=choose.choice([None, 1, 2]))
        batches = tuple(size + num_ranks + (options.extra or 0) - 1 for size in batches)
    return name, num_ranks, batches, options


def drive(seed: int, group_size: int) -> None:
    name, num_ranks, batches, options = draw(seed)
    RandomDriver(
        lambda rank: make_schedule(name, rank, num_ranks, options), batches, group_size, seed
    ).run()


@settings(max_examples=examples(6000))
@given(seeds)
def test_any_order_of_arrivals_and_ends(seed: int) -> None:
    drive(seed, group_size=1)


@settings(max_examples=examples(3000))
@given(seeds, st.integers(2, 3))
def test_any_order_with_a_leader_and_followers(seed: int, group_size: int) -> None:
    drive(seed, group_size)


@settings(max_examples=examples(2000))
@given(seeds)
def test_random_times_latencies_and_jitter(seed: int) -> None:
    name, num_ranks, batches, options = draw(seed)
    choose = random.Random(seed + 1)
    num_stages = make_schedule(name, 0, num_ranks, options).stage_map.num_stages
    times = [
        dataclasses.replace(
            UNIT,
            forward_s=choose.uniform(0.01, 5),
            backward_s=choose.uniform(0.01, 5),
            weight_s=choose.uniform(0.01, 5),
            reduce_s=choose.choice([0, choose.uniform(0, 20)]),
            update_s=choose.choice([0, choose.uniform(0, 20)]),
            latency_s=choose.choice([0, choose.uniform(0, 4)]),
            jitter=choose.choice([0.0, 0.3, 1.5]),
        )
        for _ in range(num_stages)
    ]
    run(name, num_ranks, batches, times, options, seed=seed)


# --- the laws themselves can fail ------------------------------------------------------------


def broken(change: str) -> list[Step]:
    """Return a lawful run with one thing changed."""
    steps = run("2bw", 2, (2, 2, 2)).steps()
    numbers = {str(step.action): n for n, step in enumerate(steps)}
    if change == "missing":
        del steps[numbers["1B3"]]
    elif change == "twice":
        steps.append(steps[0])
    elif change == "extra":
        steps.append(dataclasses.replace(steps[0], action=Action("F", 0, 99)))
    else:
        name, field, value = change.split()
        number = numbers[name]
        steps[number] = dataclasses.replace(steps[number], **{field: float(value)})
    return steps


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("missing", "1B3 never ran"),
        ("twice", "ran twice"),
        ("extra", "was not asked for"),
        ("1F3 start_s 0", "1F3 had no input"),
        ("1B3 start_s 0", "1B3 ran before its forward"),
        ("0B3 start_s 0", "0B3 ran before its forward"),
        ("1B2 version 1", "1B2 changed its version"),
        ("0R0 start_s 0", "0R0 ran before its last backward"),
        ("0U0 start_s 0", "0U0 ran before its reduction"),
        ("0U0 end_s 99", "used weights not made yet"),
    ],
)
def test_a_broken_law_is_noticed_and_named(change: str, text: str) -> None:
    case = Case.of([admitted(rank) for rank in range(2)], (2, 2, 2))
    with pytest.raises(LawBroken, match=text):
        check_laws(case, broken(change))


def admitted(rank: int) -> RankSchedule:
    schedule = TwoBW(rank, 2)
    for _ in range(3):
        schedule.admit(2)
    return schedule


def test_a_weight_half_before_its_backward_is_noticed() -> None:
    steps = run("zb", 2, (3,)).steps()
    steps = [dataclasses.replace(s, start_s=0.0) if str(s.action) == "1W2" else s for s in steps]
    schedules = [make_schedule("zb", rank, 2) for rank in range(2)]
    with pytest.raises(LawBroken, match="1W2 ran too early"):
        check_laws(Case.of(schedules, (3,)), steps)


def test_bounds_are_held() -> None:
    steps = run("2bw", 2, (2, 2, 2)).steps()
    case = Case.of([admitted(rank) for rank in range(2)], (2, 2, 2))
    for field, text in (("live_bounds", "rank 0: 2 live > 1"), ("version_bounds", "stage 0: 2 v")):
        with pytest.raises(LawBroken, match=text):
            check_laws(dataclasses.replace(case, **{field: (1, 1)}), steps)


def test_a_follower_that_ran_ahead_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random driver can fail: a follower that decides for itself breaks the agreement."""
    from ganglion.decide.schedules.pipeline.schedule import Follower

    monkeypatch.setattr(Follower, "next", lambda self: self.schedule.next())
    failed = 0
    for seed in range(200):
        try:
            drive(seed, group_size=2)
        except LawBroken:
            failed += 1
    assert failed > 0
