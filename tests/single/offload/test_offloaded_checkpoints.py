"""Checkpoints of offloaded runs: what resident runs save and load, and always back on the tier."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch

from ganglion import Plan, Run
from ganglion.decide.topology import Launch
from ganglion.errors import OffloadError
from ganglion.execute.checkpoint import latest_checkpoint
from ganglion.execute.comm import open_world
from tests.support.serial import Batch, assert_same_by_name, copies
from tests.support.training import Case, make_batches, make_run

pytestmark = pytest.mark.timeout(120)
CASE = Case(model="wide_mlp", dtype=torch.float32, num_steps=8, bucket_mib=0.02)
HALF = 4
PRECISIONS = ["fp32", "bf16_master", "fp16_master"]
SCHEDULES = ["one_f_one_b", "two_bw"]


def started(
    tier: str, folder: Path, precision: str, schedule: str = "one_f_one_b", optimizer: str = "adamw"
) -> Run:
    case = dataclasses.replace(
        CASE, offload_dir=folder, bucket_size=2048, optimizer=optimizer, max_grad_norm=0.5
    )
    plan = Plan(
        microbatch_size=4,
        num_microbatches=2,
        offload=tier,
        precision=precision,
        schedule=schedule,
    )
    return make_run(open_world(Launch(), plan.mesh(), timeout_s=20), plan, case)


def losses(run: Run, batches: list[Batch]) -> list[float]:
    return [result.loss for result in run.steps(batches)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("first", "second"), [("disk", "disk"), ("disk", "none"), ("none", "disk")]
)
def test_a_run_continues_bit_by_bit(
    first: str, second: str, precision: str, schedule: str, tmp_path: Path
) -> None:
    batches, saved = make_batches(CASE), tmp_path / "saved"
    with started("none", tmp_path, precision, schedule) as whole:
        before = losses(whole, batches[:HALF])
        whole.drain()
        expected = losses(whole, batches[HALF:])
        weights = copies(whole.model_tensors())
    with started(first, tmp_path, precision, schedule) as run:
        assert losses(run, batches[:HALF]) == before
        run.save(saved)
        assert losses(run, batches[HALF:]) == expected  # saving changes nothing
    with started(second, tmp_path, precision, schedule) as resumed:
        assert resumed.load(saved)
        assert losses(resumed, batches[HALF:]) == expected
        assert_same_by_name(copies(resumed.model_tensors()), weights, exactly=True)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_other_optimizers_continue_too(optimizer: str, tmp_path: Path) -> None:
    batches, saved = make_batches(CASE), tmp_path / "saved"
    with started("disk", tmp_path, "bf16_master", optimizer=optimizer) as run:
        losses(run, batches[:HALF])
        run.save(saved)
        expected = losses(run, batches[HALF:])
    with started("disk", tmp_path, "bf16_master", optimizer=optimizer) as resumed:
        losses(resumed, batches[:2])  # what was read ahead is not what counts now
        assert resumed.load(saved)
        assert losses(resumed, batches[HALF:]) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, saved = make_batches(CASE), tmp_path / "saved"

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with started("disk", tmp_path, precision) as run:
        losses(run, batches[:HALF])
        path = run.save(saved)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            with pytest.raises(OffloadError, match="no room for optimizer state"):
                losses(run, batches[HALF:])
        with pytest.raises(OffloadError, match="no room"):  # half an update must not be saved
            run.save(saved)
    assert latest_checkpoint(saved) == path
    with started("none", tmp_path, precision) as whole:
        expected = losses(whole, batches)[HALF:]
    with started("disk", tmp_path, precision) as resumed:
        assert resumed.load(saved)
        assert losses(resumed, batches[HALF:]) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_loaded_state_is_the_tier_itself(precision: str, tmp_path: Path) -> None:
    batches, saved = make_batches(CASE), tmp_path / "saved"
    with started("none", tmp_path, precision) as run:
        losses(run, batches[:HALF])
        run.save(saved)
    with started("disk", tmp_path, precision) as run:
        run.load(saved)
        parts = run._parts
        found = 0
        for optimizer in parts.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    for entry, value in optimizer.state[parameter].items():
                        if entry != "step":
                            assert value is parts.room(name, entry)
                            found += 1
        assert found == 2 * len(parts.parameters)
