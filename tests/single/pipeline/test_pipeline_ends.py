"""The ends of a pipelined run: nobody has to meet once it is under way, and ranks may leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ganglion import Plan
from ganglion.decide.schedules.pipeline import planned_schedule
from ganglion.errors import PeerLost
from ganglion.execute.comm import Arrival, Group, World, run_threads
from ganglion.execute.pipeline import Engine
from ganglion.execute.pipeline.build import _lag
from ganglion.trace import Recorder
from tests.support.covering import cells
from tests.support.pipelines import CASE, plan_for
from tests.support.training import Case, make_batches, make_run, share_of


def train_without_meeting(world: World, plan: Plan, case: Case) -> int:
    run = make_run(world, plan, case)

    def refuse(axes: tuple[str, ...]) -> Group:
        raise AssertionError(f"a group over {axes} is made while stages are anywhere")

    world._group_along = refuse
    batches = [share_of(batch, world, plan) for batch in make_batches(case)]
    return sum(1 for _ in run.steps(batches))


@cells(
    schedule=["one_f_one_b", "message_driven", "two_bw"],
    axes=[{}, {"x": 2}, {"z": 2}, {"data": 2}],
    max_grad_norm=[0.0, 0.5],
)
def test_all_groups_are_made_before_the_first_step(
    schedule: str, axes: dict[str, int], max_grad_norm: float
) -> None:
    """Making one waits for all ranks, of which some may wait for this one inside a layer."""
    case = dataclasses.replace(CASE, model="wide_gpt", max_grad_norm=max_grad_norm, num_steps=3)
    plan = dataclasses.replace(plan_for(case, schedule, 2, 2, 4), **{"data": 1, **axes})
    counts = run_threads(plan.mesh(), lambda world: train_without_meeting(world, plan, case))
    assert counts == [case.num_steps] * plan.num_ranks


class Broken:
    """A transport whose peer is gone."""

    rank, peers = 0, (1,)

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        raise PeerLost("rank 1 is gone")

    def post(self, *args: object, **numbers: int) -> None:
        pass

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def engine_of_a_lost_peer() -> Engine:
    schedule = planned_schedule(plan_for(CASE, "two_bw", 2, 1, 4), 0)
    return Engine(schedule, Broken(), lambda stage: stage, None, Recorder(0), 5.0)  # type: ignore[arg-type]


def true_after(num_calls: int) -> Callable[[], bool]:
    answers = iter([False] * num_calls)
    return lambda: next(answers, True)


def test_a_rank_may_end_before_the_others_saw_its_numbers() -> None:
    engine_of_a_lost_peer().wait_for(true_after(5), "the numbers of all ranks")


def test_a_rank_that_ends_too_early_is_lost() -> None:
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        engine_of_a_lost_peer().wait_for(lambda: False, "the numbers of all ranks")


@pytest.mark.parametrize(
    ("pipe", "num_microbatches", "lag"), [(2, 4, 1), (4, 4, 1), (5, 4, 2), (5, 2, 3)]
)
def test_as_many_batches_enter_as_keep_the_first_stage_busy(
    pipe: int, num_microbatches: int, lag: int
) -> None:
    """The stage forwards microbatch `pipe` before the first is back, and no whole batch more."""
    assert _lag(Plan(pipe=pipe, num_microbatches=num_microbatches, schedule="two_bw")) == lag
