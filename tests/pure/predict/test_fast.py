"""Shortcuts of predictions against the long way: what is held, and steps of many microbatches."""

from __future__ import annotations

import random

import pytest

from ganglion.decide.costs import Cluster, StageTimes, parse_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict.memory import holding_of
from ganglion.decide.schedules.pipeline import SCHEDULES, planned_holding
from ganglion.decide.simulator import (
    PlanFigures,
    figures_of,
    simulate_figures,
    simulate_plan,
    steady,
)
from ganglion.trace import summarise

LISTED = tuple(name for name in SCHEDULES if name != "message_driven")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pipe", "count"), [(2, 24), (4, 64), (5, 60)])
def test_few_microbatches_hold_as_much_as_many(schedule: str, pipe: int, count: int) -> None:
    plan = Plan(pipe=pipe, schedule=schedule, num_microbatches=count)
    for rank in range(pipe):
        assert holding_of(plan, rank) == planned_holding(plan, rank)


def machine() -> Cluster:
    return parse_cluster(
        "ranks_per_node = 4\n[links.intra]\nlatency_s = 0.01\nbandwidth_gbps = 8e-6\n"
        "[links.inter]\nlatency_s = 0.05\nbandwidth_gbps = 4e-6\nshared = true\n"
        "[stages]\nforward_s = 1.0\nbackward_s = 2.0\n",
        "test.toml",
    )


def drawn(seed: int, pipe: int) -> list[StageTimes]:
    """Return stages of different times, with messages and reductions that may take long."""
    chance = random.Random(seed)
    message_bytes = (0, 50, 600)[seed % 3]
    return [
        StageTimes(
            forward_s=chance.uniform(0.8, 1.2),
            backward_s=chance.uniform(1.6, 2.4),
            update_s=chance.uniform(0, 3),
            message_bytes=message_bytes,
            gradient_bytes=chance.choice([0, 1000, 9000]),
        )
        for _ in range(pipe)
    ]


def both(plan: Plan, times: list[StageTimes]) -> tuple[PlanFigures, PlanFigures]:
    """Return the figures taken from shorter steps, and those of the whole simulation."""
    cluster = machine()
    short = simulate_figures(plan, times, cluster, num_steps=3)
    whole = figures_of(simulate_plan(plan, times, cluster, num_steps=3))
    return short, whole


@pytest.fixture(autouse=True)
def always_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "WHOLE_ACTIONS", 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_figures_are_those_of_the_trace(schedule: str) -> None:
    plan = Plan(data=2, pipe=4, schedule=schedule, num_microbatches=8)
    result = simulate_plan(plan, drawn(2, 4), machine(), num_steps=2)
    found = figures_of(result)
    ranks = summarise(result.simulation.events()).ranks
    assert found.bubbles == pytest.approx([one.bubble for one in ranks])
    assert [one.waits_s for one in found.uses] == pytest.approx(
        [one.exposed_comm_s for one in ranks]
    )
    assert found.bubble == pytest.approx(result.simulation.bubble())


@pytest.mark.parametrize("schedule", LISTED)
@pytest.mark.parametrize("pipe", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_long_steps_lie_on_a_line_through_short_ones(schedule: str, pipe: int, seed: int) -> None:
    plan = Plan(data=2, pipe=pipe, schedule=schedule, num_microbatches=48)
    times = drawn(seed, pipe)
    short, whole = both(plan, times)
    assert short.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert short.makespan_s == pytest.approx(whole.makespan_s, rel=0.01)
    assert short.bubbles == pytest.approx(whole.bubbles, abs=0.01)
    assert short.peak_live == whole.peak_live
    assert short.versions == whole.versions
    waits = [one.waits_s for one in whole.uses]
    assert [one.waits_s for one in short.uses] == pytest.approx(waits, abs=0.02 * whole.makespan_s)


@pytest.mark.parametrize("pipe", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_message_driven_steps_nearly_do(pipe: int, seed: int) -> None:
    plan = Plan(data=2, pipe=pipe, schedule="message_driven", num_microbatches=96)
    short, whole = both(plan, drawn(seed, pipe))
    assert short.step_s == pytest.approx(whole.step_s, rel=0.03)
