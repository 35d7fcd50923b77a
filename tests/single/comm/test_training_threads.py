"""Data parallel equals serial: every layout, model and option, with ranks as threads."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from ganglion import Plan
from ganglion.execute.comm import World, run_threads
from tests.support.covering import Values, cells
from tests.support.serial import TOLERANCE, History, assert_same_by_name, copies
from tests.support.training import (
    OPTIMIZERS,
    SHAPES,
    Case,
    make_model,
    make_run,
    train_parallel,
    train_serial,
)

LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (8, 1)]  # data, num_microbatches


def plan_for(data: int, num_microbatches: int, case: Case) -> Plan:
    size = case.global_batch_size // (data * num_microbatches)
    return Plan(data=data, microbatch_size=size, num_microbatches=num_microbatches)


@functools.cache
def serial(case: Case) -> History:
    return train_serial(case)


def assert_equals_serial(case: Case, plan: Plan) -> None:
    expected = serial(case)
    for history in run_threads(plan.mesh(), lambda world: train_parallel(world, plan, case)):
        assert history.losses == pytest.approx(expected.losses, rel=TOLERANCE[case.dtype][0])
        assert history.norms == pytest.approx(expected.norms, rel=TOLERANCE[case.dtype][0])
        for actual, wanted in zip(history.gradients, expected.gradients, strict=True):
            assert_same_by_name(actual, wanted)
        assert_same_by_name(history.weights, expected.weights)


def several(layout: tuple[int, int]) -> dict[str, bool]:
    """Say of what a layout has several: how many matters less with every model."""
    return {"data": layout[0] > 1, "num_microbatches": layout[1] > 1}


@cells(layout=Values(LAYOUTS, unfold=several), model=SHAPES, optimizer=OPTIMIZERS)
def test_equals_serial_in_double(model: str, optimizer: str, layout: tuple[int, int]) -> None:
    case = Case(model=model, optimizer=optimizer)
    assert_equals_serial(case, plan_for(*layout, case))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_serial_in_single(layout: tuple[int, int]) -> None:
    case = Case(dtype=torch.float32, optimizer="sgd")
    assert_equals_serial(case, plan_for(*layout, case))


@pytest.mark.parametrize("layout", [(1, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0])
def test_clipping_equals_serial(layout: tuple[int, int], max_grad_norm: float) -> None:
    case = Case(max_grad_norm=max_grad_norm)
    assert_equals_serial(case, plan_for(*layout, case))


@pytest.mark.parametrize("bucket_mib", [1e-4, 0.002, 25.0])
def test_bucket_size_and_overlap_never_change_a_bit(bucket_mib: float) -> None:
    case = Case(dtype=torch.float32, bucket_mib=bucket_mib)
    plan = plan_for(2, 2, case)
    waiting = dataclasses.replace(case, overlap=False)
    overlapped = run_threads(plan.mesh(), lambda world: train_parallel(world, plan, case))
    waited = run_threads(plan.mesh(), lambda world: train_parallel(world, plan, waiting))
    for one, other in zip(overlapped, waited, strict=True):
        assert one.losses == other.losses
        assert_same_by_name(one.weights, other.weights, exactly=True)


@pytest.mark.parametrize("model", ["gpt", "tied", "conv"])
def test_replicas_start_equal_however_they_were_made(model: str) -> None:
    """Blocks built from different seeds on each rank: the first replica's weights count."""
    case = Case(model=model)
    plan = plan_for(4, 1, case)

    def initial_weights(world: World) -> dict[str, torch.Tensor]:
        return copies(make_run(world, plan, case, seed=world.rank).model_tensors())

    expected = copies(dict(make_model(case, seed=0).named_parameters()))
    for weights in run_threads(plan.mesh(), initial_weights):
        assert_same_by_name(weights, expected, exactly=True)
