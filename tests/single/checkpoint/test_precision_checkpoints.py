"""Checkpoints of half-precision runs: fp32 masters and the loss scale; any precision may load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ganglion import Plan
from ganglion.decide.plan import BF16_MASTER, FP16_MASTER
from ganglion.decide.topology import Mesh
from ganglion.execute.checkpoint import latest_checkpoint, load_exported, read_specs
from ganglion.execute.comm import World, run_threads
from ganglion.execute.train import Run
from tests.single.update.test_loss_scaling import spoil, state_of
from tests.support.pipelines import plan_for
from tests.support.serial import assert_same_by_name, copies
from tests.support.training import Case, make_batches, make_model, make_run

CASE = Case(num_steps=6, global_batch_size=16, dtype=torch.float32)


def alone(plan: Plan, seed: int = 1) -> Run:
    """Return a run of one process, without a thread of its own."""
    made: list[Run] = []
    run_threads(Mesh(), lambda world: made.append(make_run(world, plan, CASE, seed)))
    return made[0]


def trained(run: Run, first: int, last: int) -> list[tuple[float, float | None, bool]]:
    found = run.steps(make_batches(CASE)[first:last])
    return [(result.loss, result.loss_scale, result.skipped) for result in found]


def plan_of(precision: str, schedule: str) -> Plan:
    return plan_for(CASE, schedule, 1, 1, 4, precision=precision)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw"])
@pytest.mark.parametrize("precision", [BF16_MASTER, FP16_MASTER])
def test_a_resumed_run_equals_one_that_went_on(
    tmp_path: Path, precision: str, schedule: str
) -> None:
    """With an overflow right before the checkpoint: the scale that two_bw still owes is saved."""
    plan = plan_of(precision, schedule)
    first = alone(plan)
    if precision == FP16_MASTER:
        spoil(first, plan, 2)
    before = trained(first, 0, 3)
    assert before[2][2] == (precision == FP16_MASTER)
    first.save(tmp_path)
    went_on = trained(first, 3, 6)
    second = alone(plan, seed=5)
    assert second.load(tmp_path)
    assert trained(second, 3, 6) == went_on
    assert_same_by_name(state_of(second), state_of(first), exactly=True)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw"])
@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (BF16_MASTER, "fp32"),
        ("fp32", BF16_MASTER),
        ("fp32", FP16_MASTER),
        (FP16_MASTER, BF16_MASTER),
    ],
)
def test_another_precision_takes_the_weights_and_moments(
    tmp_path: Path, saving: str, loading: str, schedule: str
) -> None:
    first, second = alone(plan_of(saving, schedule)), alone(plan_of(loading, schedule), seed=5)
    trained(first, 0, 3)
    first.save(tmp_path)
    assert second.load(tmp_path)
    assert_same_by_name(copies(second.model_tensors()), copies(first.model_tensors()), exactly=True)
    for name, parameter in second._parts.parameters.items():
        wanted = first.model_tensors()[name].to(parameter.dtype)
        assert torch.equal(parameter, wanted), name
    older = first._parts.executor.older_weights()
    for name, tensor in second._parts.executor.older_weights().items():
        assert torch.equal(tensor, older[name].to(tensor.dtype)), name
    assert_same_by_name(moments(second), moments(first), exactly=True)
    assert trained(second, 3, 6)[-1][0] == pytest.approx(trained(first, 3, 6)[-1][0], rel=1e-2)


def moments(run: Run) -> dict[str, Tensor]:
    return {n: t for n, t in state_of(run).items() if " " in n and not n.startswith("half ")}


def test_what_is_saved_is_fp32_under_serial_names(tmp_path: Path) -> None:
    run = alone(plan_of(BF16_MASTER, "two_bw"))
    trained(run, 0, 2)
    run.save(tmp_path)
    path = latest_checkpoint(tmp_path)
    assert path is not None
    specs = read_specs(path)
    assert {spec.dtype for spec in specs.values()} == {torch.float32}
    names = set(dict(make_model(CASE).named_parameters()))
    assert {n.removeprefix("model.") for n in specs if n.startswith("model.")} == names
    assert_same_by_name(load_exported(path), copies(run.model_tensors()), exactly=True)


def test_gradients_are_those_of_the_optimizer(tmp_path: Path) -> None:
    """Clipped and unscaled, in fp32: what a user looks at."""
    case = dataclasses.replace(CASE, max_grad_norm=0.1)
    plan = plan_of(FP16_MASTER, "one_f_one_b")

    def body(world: World) -> tuple[float, Tensor]:
        run = make_run(world, plan, case)
        list(run.steps(make_batches(case)[:1]))
        flat = torch.cat([gradient.flatten() for gradient in run.gradients().values()])
        return float(torch.linalg.vector_norm(flat)), flat

    ((norm, flat),) = run_threads(plan.mesh(), body)
    assert flat.dtype == torch.float32
    assert norm == pytest.approx(0.1, rel=1e-4)
