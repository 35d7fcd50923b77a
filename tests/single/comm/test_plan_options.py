"""What a plan tells its schedule holds in the engine: options, cuts of chunks, own schedules."""

from __future__ import annotations

import dataclasses

import pytest

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.schedules.pipeline import BUILT_IN, planned_schedule
from ganglion.decide.schedules.pipeline.listed import GPipe
from ganglion.errors import ConfigError
from ganglion.execute.comm import run_threads
from ganglion.execute.models import cross_entropy
from ganglion.trace import Event
from tests.support.pipelines import (
    CASE,
    assert_equals,
    assert_equals_delayed,
    plan_for,
)
from tests.support.training import (
    OPTIMIZERS,
    Case,
    make_model,
    train_serial,
    train_traced,
)


@pytest.mark.parametrize(
    "plan",
    [
        plan_for(CASE, "interleaved", 2, 1, 4, chunks=3),
        plan_for(CASE, "interleaved", 2, 1, 4, stage_boundaries=(1, 2, 5)),
        plan_for(CASE, "zbv", 2, 1, 4, stage_boundaries=(1, 4, 5)),
        plan_for(CASE, "axonn", 3, 1, 8, limit=1),
        plan_for(CASE, "axonn", 3, 1, 8, limit=8, priority="forward"),
        plan_for(CASE, "axonn", 3, 1, 8, priority="arrival"),
    ],
    ids=str,
)
def test_options_and_cuts_equal_serial(plan: Plan) -> None:
    assert_equals(plan, CASE, train_serial(CASE))


@pytest.mark.parametrize("extra", [1, 2])
def test_two_bw_with_a_raised_cap(extra: int) -> None:
    case = Case(num_steps=5, global_batch_size=16)
    assert_equals_delayed(plan_for(case, "two_bw", 2, 1, 4, extra=extra), case)


def traced(plan: Plan) -> list[tuple[Plan, list[Event]]]:
    """Return the plan as decided and the events of every rank."""
    case = dataclasses.replace(CASE, num_steps=2)

    return run_threads(plan.mesh(), lambda world: train_traced(world, plan, case))


def most_live(events: list[Event]) -> int:
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_s):
        live += (event.kind == "forward") - (event.kind == "backward")
        most = max(most, live)
    return most


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("message_driven", {}),
        ("message_driven", {"limit": 2}),
        ("two_bw", {"extra": 1}),
        ("interleaved", {"chunks": 3}),
    ],
)
def test_live_microbatches_stay_within_the_declared_bound(
    schedule: str, options: dict[str, int]
) -> None:
    plan = plan_for(CASE, schedule, 2, 1, 8, **options)
    for rank, (_, events) in enumerate(traced(plan)):
        bound = planned_schedule(plan, rank).live_bound
        assert bound is not None
        assert 1 <= most_live(events) <= bound


def test_a_run_says_what_its_plan_left_open() -> None:
    """A prediction of this plan then uses the limit and the cut that were used."""
    for decided, _ in traced(plan_for(CASE, "axonn", 2, 1, 8)):
        assert (decided.schedule, decided.limit) == ("message_driven", 4)
        assert len(decided.stage_boundaries) == 1
    for decided, _ in traced(plan_for(CASE, "interleaved", 2, 1, 2)):
        assert len(decided.stage_boundaries) == 3
    cuts = (1, 2, 5)
    for decided, _ in traced(plan_for(CASE, "interleaved", 2, 1, 2, stage_boundaries=cuts)):
        assert decided.stage_boundaries == cuts


def test_a_broken_schedule_is_refused_before_ranks_meet() -> None:
    class Greedy(GPipe):
        live_bound = 1

    plan = Plan(pipe=2, num_microbatches=4, schedule="greedy")
    with pytest.raises(ConfigError, match=r"'greedy' breaks a law .* rank 0: 4 live > 1"):
        parallelize(
            make_model(CASE),
            cross_entropy,
            OPTIMIZERS["sgd"],
            plan,
            RunSettings(schedules=BUILT_IN.register("greedy", Greedy)),
        )
