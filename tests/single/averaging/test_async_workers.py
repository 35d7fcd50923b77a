"""Workers of asynchronous methods wait for nobody, except where all must be at one place."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ganglion import Plan
from ganglion.decide.topology import Mesh
from ganglion.execute.comm import World, run_threads
from ganglion.execute.pipeline import Share
from ganglion.execute.train.async_workers import Notices
from ganglion.execute.train.averaged import AveragingSettings
from ganglion.execute.update import StepResult
from tests.support.training import Case, make_batches, make_run, share_of

CASE = Case(
    model="mlp", num_steps=12, global_batch_size=8, averaging=AveragingSettings(tau=1, beta=0.5)
)
PATIENCE_S = 20.0
pytestmark = pytest.mark.timeout(120)


def planned(**axes: Any) -> Plan:
    plan = Plan(data=2, averaging="async_easgd", **axes)
    size = CASE.global_batch_size // plan.num_shares
    return dataclasses.replace(plan, microbatch_size=size)


@pytest.mark.parametrize("axes", [{}, {"pipe": 2}], ids=str)
def test_a_worker_goes_on_while_another_stands_still(axes: dict[str, int]) -> None:
    plan, goes_on = planned(**axes), threading.Event()

    def shares(world: World) -> Iterator[Share]:
        for number, batch in enumerate(make_batches(CASE)):
            if number == 2 and world.coordinates.data == 1:
                assert goes_on.wait(PATIENCE_S), "worker 0 waits for worker 1"
            yield share_of(batch, world, plan)

    def body(world: World) -> list[int]:
        run, steps = make_run(world, plan, CASE), []
        for result in run.steps(shares(world)):
            steps.append(result.step)
            if world.coordinates.data == 0 and result.step == 8:
                goes_on.set()
        run.close()
        return steps

    for steps in run_threads(plan.mesh(), body):
        assert steps == list(range(1, 13))


@pytest.mark.parametrize("axes", [{}, {"pipe": 2}], ids=str)
def test_all_stop_when_one_is_asked_to_and_meet_then(axes: dict[str, int]) -> None:
    """At steps of their own; a worker that has reached the end does the same as the others."""
    plan, case = planned(**axes), dataclasses.replace(CASE, num_steps=400)
    batches = make_batches(dataclasses.replace(CASE, num_steps=4)) * 100

    def shares(world: World) -> Iterator[Share]:
        for batch in batches:
            time.sleep(0.004 * world.coordinates.data)
            yield share_of(batch, world, plan)

    def body(world: World) -> tuple[int, bool]:
        run = make_run(world, plan, case)
        for result in run.steps(shares(world), until=400):
            if world.rank == world.num_ranks - 1 and result.step == 5:
                run.request_stop()
            if result.stop_requested:
                break
        run.drain()
        stopped_at = run.step
        world.barrier()
        run.close()
        return stopped_at, result.stop_requested

    found = run_threads(plan.mesh(), body)
    assert all(is_stopped for _, is_stopped in found)
    assert all(5 < stopped_at < 400 for stopped_at, _ in found)
    by_worker = [{s for s, _ in found[w * plan.pipe : (w + 1) * plan.pipe]} for w in range(2)]
    if not axes:  # ranks of a worker are at the same step
        assert all(len(steps) == 1 for steps in by_worker)


def test_evaluations_and_drains_find_all_at_the_same_step() -> None:
    plan = planned()
    at: dict[int, int] = {}

    def shares(world: World) -> Iterator[Share]:
        pause = random.Random(world.rank)
        for batch in make_batches(CASE):
            time.sleep(pause.choice((0.0, 0.01)))
            yield share_of(batch, world, plan)

    def body(world: World) -> list[int]:
        run, seen = make_run(world, plan, CASE), []
        for result in run.steps(shares(world), drain_at=lambda step: step % 4 == 0):
            if result.step % 4 == 0:
                at[world.rank] = result.step
                world.barrier()
                seen.append(len(set(at.values())))
                world.barrier()
        run.close()
        return seen

    assert run_threads(plan.mesh(), body) == [[1, 1, 1]] * 2


def result_of(step: int, loss: float, *, stops: bool = False) -> StepResult:
    return StepResult(
        step=step,
        loss=loss,
        grad_norm=2 * loss,
        lr=0.1,
        peak_bytes=int(loss),
        stop_requested=stops,
        finished_s=0.0,
    )


def test_news_are_means_of_what_was_told_last() -> None:
    def body(world: World) -> list[float]:
        notices = Notices(world)
        notices.step(result_of(1, 10.0 + world.rank))
        world.barrier()
        alone = notices.meet()
        assert alone.all_wait
        assert not alone.stops
        return [alone.loss, alone.grad_norm, alone.peak_bytes]

    for news in run_threads(Mesh(data=3), body):
        assert news == [11.0, 22.0, 12.0]


def test_nobody_hears_of_the_others_before_they_have_told_something() -> None:
    may_tell = threading.Event()

    def body(world: World) -> float:
        notices = Notices(world)
        if world.rank == 1:
            assert may_tell.wait(PATIENCE_S)
        loss = notices.step(result_of(1, 5.0 * (1 + world.rank))).loss
        may_tell.set()
        notices.meet()
        return loss

    first, _ = run_threads(Mesh(data=2), body)
    assert first == 5.0


@pytest.mark.parametrize("seed", range(6))
def test_all_hear_of_a_stop_once_and_then_meet(seed: int) -> None:
    """Whatever the pace: some hear of it between steps, others while they wait at the end."""
    num_steps = 30

    def body(world: World) -> tuple[int, bool]:
        pace, notices = random.Random(seed * 10 + world.rank), Notices(world)
        asks_at = random.Random(seed).randrange(num_steps)
        for step in range(num_steps):
            time.sleep(pace.choice((0.0, 0.0, 0.003)))
            stops = world.rank == 2 and step >= asks_at
            if notices.step(result_of(step, 1.0, stops=stops)).stops:
                break
        else:
            news = notices.meet()
            assert news.stops or news.all_wait
            if not news.stops:
                return num_steps, False
        assert notices.meet().all_wait
        return step, True

    found = run_threads(Mesh(data=3), body)
    assert len({is_stopped for _, is_stopped in found}) == 1
    assert found[0][1]
