"""Pipelines of tensor groups equal the serial model, whatever the order of messages."""

from __future__ import annotations

import dataclasses

import pytest

from ganglion import Plan
from ganglion.comm import Faults, run_threads
from tests.pipelines import FLUSHING, delayed, plan_for
from tests.serial import TOLERANCE, History, assert_same_by_name
from tests.tensors import SETTINGS, Held, whole
from tests.training import Case, train_serial, train_split_at_once

CASE = Case(model="wide_tied", num_steps=3, global_batch_size=8, max_grad_norm=0.5)
pytestmark = pytest.mark.timeout(120)


def _assert_equals(plan: Plan, case: Case, wanted: History, faults: Faults | None = None) -> None:
    held: list[Held] = run_threads(
        plan.mesh(), lambda world: train_split_at_once(world, plan, case), faults=faults
    )
    relative, absolute = TOLERANCE[case.dtype]
    for rank in held:
        assert rank.history.losses == pytest.approx(wanted.losses, rel=relative, abs=absolute)
        assert rank.history.norms == pytest.approx(wanted.norms, rel=relative, abs=absolute)
    assert_same_by_name(whole(held, [rank.history.weights for rank in held]), wanted.weights)


AXES = [{"x": 2}, {"y": 2}, {"z": 2}, {"x": 2, "z": 2}, {"y": 2, "data": 2}]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("schedule", FLUSHING)
def test_flushing_schedules_equal_the_serial_model(schedule: str, axes: dict[str, int]) -> None:
    shares = axes.get("z", 1) * axes.get("data", 1)
    case = dataclasses.replace(CASE, model="wide_gpt3")
    plan = dataclasses.replace(plan_for(case, schedule, 2, shares, 4 // shares), data=1)
    _assert_equals(dataclasses.replace(plan, **axes), case, train_serial(case))


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_two_bw_equals_the_delay_written_out(settings: str, axes: dict[str, int]) -> None:
    shares = axes.get("z", 1) * axes.get("data", 1)
    case = dataclasses.replace(CASE, tensor=SETTINGS[settings])
    plan = dataclasses.replace(plan_for(case, "two_bw", 2, shares, 8 // shares), data=1)
    _assert_equals(dataclasses.replace(plan, **axes), case, delayed(case))


@pytest.mark.parametrize("schedule", ["message_driven", "two_bw"])
def test_20_runs_with_delays_and_reordering_change_nothing(schedule: str) -> None:
    wanted = train_serial(CASE) if schedule == "message_driven" else delayed(CASE)
    plan = dataclasses.replace(plan_for(CASE, schedule, 2, 2, 4), data=1, y=2, z=2)
    for seed in range(20):
        faults = Faults(seed=seed, delay_s=0.001, reorder=True)
        _assert_equals(plan, CASE, wanted, faults)
