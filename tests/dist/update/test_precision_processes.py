"""Half precision over real processes: sums and messages in half, one overflow, one checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ganglion import Plan
from ganglion.decide.plan import BF16_MASTER, FP16_MASTER
from ganglion.execute.comm import World, torch_world
from tests.single.update.test_loss_scaling import CASE, SPOILED, spoil
from tests.support.halves import train_in_half
from tests.support.harness import Ranks
from tests.support.serial import assert_same_by_name, copies
from tests.support.training import make_batches, make_run, share_of

Found = tuple[list[bool], list[float | None], dict[str, Tensor]]


def train(world: World, plan: Plan, transport: str, victim: int, folder: Path | None) -> Found:
    """Train all batches; with a folder, half of them, and the rest after a checkpoint."""
    own = torch_world(world.rank, plan.mesh(), timeout_s=30.0, transport=transport)
    run, results = make_run(own, plan, CASE), []
    if world.rank == victim:
        spoil(run, plan, SPOILED)
    shares = [share_of(batch, own, plan) for batch in make_batches(CASE)]
    if folder is not None:
        results += run.steps(shares[: SPOILED + 1])
        run.save(folder)
        run = make_run(own, plan, CASE, seed=5)
        assert run.load(folder)
        shares = shares[SPOILED + 1 :]
    results += run.steps(shares)
    weights = copies(run.model_tensors())
    return [r.skipped for r in results], [r.loss_scale for r in results], weights


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, precision=BF16_MASTER),
        Plan(data=2, precision=FP16_MASTER),
        Plan(pipe=2, precision=FP16_MASTER, schedule="two_bw"),
        Plan(pipe=2, precision=BF16_MASTER, compute_fp32=True),
    ],
    ids=["bf16 data", "fp16 data", "fp16 two_bw", "bf16 widened"],
)
def test_processes_equal_the_loop(ranks: Ranks, tmp_path: Path, plan: Plan, transport: str) -> None:
    plan = dataclasses.replace(plan, num_microbatches=4, microbatch_size=4 // plan.data)
    is_scaled = plan.precision == FP16_MASTER
    folder = tmp_path if plan.pipe > 1 else None
    found = ranks.run(2, train, plan, transport, 1 if is_scaled else -1, folder)
    wanted = train_in_half(
        CASE,
        plan.precision,
        4,
        num_replicas=plan.data,
        delay=int(plan.schedule == "two_bw"),
        compute_fp32=plan.compute_fp32,
        spoiled=SPOILED if is_scaled else None,
    )
    weights: dict[str, Tensor] = {}
    for skipped, scales, held in found:
        assert skipped == wanted.skipped
        assert scales == (wanted.scales if is_scaled else [None] * 5)
        weights.update(held)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert_same_by_name(weights, wanted.weights, exactly=True)
