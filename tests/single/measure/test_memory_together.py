"""Every way to save memory together with every other: equal to the plain twin, bit by bit."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from ganglion import Plan
from ganglion.execute.comm import World, run_threads
from ganglion.execute.offload.activation_tiers import ScratchFile
from ganglion.execute.tensor import TensorSettings
from ganglion.execute.train.settings import ActivationSettings
from tests.support.covering import cells
from tests.support.serial import History, assert_same_by_name
from tests.support.training import Case, make_run, train_split_at_once

pytestmark = pytest.mark.timeout(120)

SCHEDULES = ("gpipe", "one_f_one_b", "message_driven", "two_bw")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "half": {"precision": "bf16_master"},
    "widened": {"precision": "bf16_master", "compute_fp32": True},
}
CASE = Case(model="wide_gpt", dtype=torch.float32, num_steps=3, max_grad_norm=0.5)


def trained(plan: Plan, case: Case) -> list[History]:
    size = case.global_batch_size // (plan.num_microbatches * plan.data * plan.z)
    plan = dataclasses.replace(plan, microbatch_size=size)
    held = run_threads(plan.mesh(), lambda world: train_split_at_once(world, plan, case))
    return [each.history for each in held]


@functools.cache
def plain_twin(plan: Plan, case: Case) -> list[History]:
    return trained(plan, case)


def assert_saving_changes_nothing(plain: Plan, case: Case, folder: Path, recompute: str) -> None:
    saving = dataclasses.replace(
        plain, recompute=recompute, offload="disk", offload_activations="disk"
    )
    saving_case = dataclasses.replace(
        case,
        offload_dir=folder,
        bucket_size=2048,
        activations=ActivationSettings(folder=folder, min_bytes=1),
    )
    wanted = plain_twin(plain, case)
    for found, expected in zip(trained(saving, saving_case), wanted, strict=True):
        assert found.losses == expected.losses
        assert found.norms == expected.norms
        assert_same_by_name(found.weights, expected.weights, exactly=True)


@cells(schedule=SCHEDULES, recompute=["none", "full", "sqrt"], precision=PRECISIONS)
def test_pipelines(schedule: str, recompute: str, precision: str, tmp_path: Path) -> None:
    plan = Plan(pipe=2, num_microbatches=2, schedule=schedule, **PRECISIONS[precision])
    assert_saving_changes_nothing(plan, CASE, tmp_path, recompute)


@cells(axes=[{"x": 2}, {"z": 2}, {"x": 2, "pipe": 2, "schedule": "two_bw"}], precision=PRECISIONS)
def test_split_layers(axes: dict[str, Any], precision: str, tmp_path: Path) -> None:
    plan = Plan(num_microbatches=2, **axes, **PRECISIONS[precision])
    assert_saving_changes_nothing(plan, CASE, tmp_path, "sqrt")


@cells(axes=[{}, {"x": 2}, {"z": 2}, {"x": 2, "pipe": 2}], precision=["fp32", "half"])
def test_muon_of_whole_and_split_matrices(
    precision: str, axes: dict[str, Any], tmp_path: Path
) -> None:
    plan = Plan(num_microbatches=2, **axes, **PRECISIONS[precision])
    case = dataclasses.replace(CASE, optimizer="muon")
    assert_saving_changes_nothing(plan, case, tmp_path, "full")


def test_activations_of_widened_blocks_leave_memory_as_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widening has hooks of its own for what autograd saves: they must not keep it."""
    moved: list[int] = []
    make_room = ScratchFile.room

    def room(tier: ScratchFile, num_bytes: int) -> Any:
        moved.append(num_bytes)
        return make_room(tier, num_bytes)

    monkeypatch.setattr(ScratchFile, "room", room)
    counts = []
    for precision in ("fp32", "widened"):
        moved.clear()
        plan = Plan(offload_activations="disk", **PRECISIONS[precision])
        settings = ActivationSettings(folder=tmp_path, min_bytes=1)
        trained(plan, dataclasses.replace(CASE, num_steps=1, activations=settings))
        counts.append(sum(moved))
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_budget_for_gathered_weights_counts_them_as_they_are_stored(pipe: int) -> None:
    """So twice as many bytes keep in fp32 what a budget keeps in half, as the model predicts."""

    def kept(keep_bytes: int, precision: str) -> list[list[str]]:
        plan = Plan(pipe=pipe, z=2, microbatch_size=4, **PRECISIONS[precision])
        case = dataclasses.replace(CASE, tensor=TensorSettings(keep_bytes=keep_bytes))

        def names(world: World) -> list[str]:
            with make_run(world, plan, case) as run:
                report = run.tensor_report()
                assert report is not None
                return list(report.kept)

        return run_threads(plan.mesh(), names)

    half = kept(10_000, "half")
    assert half == kept(20_000, "fp32") != kept(10_000, "fp32")
