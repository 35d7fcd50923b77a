"""Elastic averaging of runs over real processes: equal to the workers written out, and resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ganglion import Plan
from ganglion.execute.comm import World, torch_world
from ganglion.execute.train import Run
from ganglion.execute.train.averaged import AveragingSettings
from tests.support.averaged import (
    Weights,
    WorkerSaw,
    assert_equals,
    seen,
    train_averaged,
    train_workers,
)
from tests.support.command import TINY, ganglion, metrics_of
from tests.support.harness import Ranks
from tests.support.serial import History, assert_same_by_name, copies
from tests.support.training import Case, make_batches, make_run, share_of

SETTINGS = AveragingSettings(tau=2, alpha=0.3)
CASE = Case(model="wide_gpt", num_steps=5, max_grad_norm=0.3, averaging=SETTINGS)
SAVED_AT = 3


def planned(method: str = "sync_easgd", **axes: int) -> Plan:
    plan = Plan(averaging=method, **axes)  # type: ignore[arg-type]
    size = CASE.global_batch_size // plan.num_shares
    return dataclasses.replace(plan, microbatch_size=size)


def train_on(world: World, plan: Plan, case: Case) -> WorkerSaw:
    return train_averaged(torch_world(world.rank, plan.mesh(), timeout_s=30.0), plan, case)


@pytest.mark.parametrize(
    "axes", [{"data": 2}, {"data": 2, "pipe": 2}, {"data": 2, "z": 2}], ids=str
)
def test_processes_equal_workers_written_out(ranks: Ranks, axes: dict[str, int]) -> None:
    plan = planned(**axes)
    found = ranks.run(plan.num_ranks, train_on, plan, CASE)
    assert_equals(found, train_workers(CASE, 2, tau=2, alpha=0.3))


def open_run(world: World, plan: Plan, case: Case) -> Run:
    return make_run(torch_world(world.rank, plan.mesh(), timeout_s=30.0), plan, case)


def train_until(run: Run, case: Case, until: int) -> History:
    history = History()
    batches = [share_of(batch, run.world, run.plan) for batch in make_batches(case)]
    for result in run.steps(batches[run.step :], until=until):
        history.losses.append(result.loss)
    history.weights = copies(run.model_tensors())
    return history


def save_and_go_on(world: World, plan: Plan, case: Case, folder: str) -> WorkerSaw:
    run = open_run(world, plan, case)
    train_until(run, case, SAVED_AT)
    run.save(folder)
    return seen(run, case, train_until(run, case, case.num_steps))


def resume(world: World, plan: Plan, case: Case, folder: str) -> WorkerSaw:
    run = open_run(world, plan, case)
    train_until(run, dataclasses.replace(case, num_steps=1), 1)  # its weights and centre are wrong
    assert run.load(folder)
    assert run.step == SAVED_AT
    return seen(run, case, train_until(run, case, case.num_steps))


@pytest.mark.parametrize("method", ["sync_easgd", "local_sgd", "diloco"])
@pytest.mark.parametrize(
    "axes", [{"data": 2}, {"data": 2, "pipe": 2}, {"data": 2, "z": 2}], ids=str
)
def test_a_resumed_run_repeats_every_bit(
    ranks: Ranks, tmp_path: Path, axes: dict[str, int], method: str
) -> None:
    averaging = SETTINGS if method == "sync_easgd" else AveragingSettings(tau=2)
    case = dataclasses.replace(CASE, dtype=torch.float32, averaging=averaging)
    plan = planned(method, **axes)
    first = ranks.run(plan.num_ranks, save_and_go_on, plan, case, str(tmp_path))
    again = ranks.run(plan.num_ranks, resume, plan, case, str(tmp_path))
    for one, other in zip(first, again, strict=True):
        assert one.held.history.losses == other.held.history.losses
        assert one.num_exchanges == other.num_exchanges
        assert_same_by_name(one.held.history.weights, other.held.history.weights, exactly=True)
        assert_same_by_name(one.center, other.center, exactly=True)


def save(world: World, plan: Plan, case: Case, folder: str) -> Weights:
    run = open_run(world, plan, case)
    train_until(run, case, SAVED_AT)
    run.save(folder)
    return copies(run._parts.shared_tensors())


def begin_at(world: World, plan: Plan, case: Case, folder: str) -> tuple[Weights, Weights]:
    run = open_run(world, plan, case)
    assert run.load(folder)
    found = copies(run.model_tensors()), copies(run._parts.shared_tensors())
    world.barrier()  # whoever goes on moves the centre
    train_until(run, case, case.num_steps)
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (planned(data=4), planned(data=2)),
        (planned(data=2), planned("local_sgd", data=4)),
        (planned("diloco", data=2), planned("diloco", data=4)),
        (planned("diloco", data=2), planned(data=4)),
        (planned(data=2), planned("slow_momentum", data=4)),
        (planned("async_easgd", data=2), planned("async_easgd", data=4)),
        (planned("async_msgd", data=4), planned("diloco", data=2)),
        (planned("diloco", data=2), planned("hogwild_sgd", data=2)),
        (planned(data=2), planned("none", data=2)),
        (planned("none", data=2), planned(data=4)),
    ],
    ids=lambda plan: f"{plan.averaging}{plan.data}",
)
def test_others_begin_at_the_centre(
    ranks: Ranks, tmp_path: Path, before: Plan, after: Plan
) -> None:
    case = dataclasses.replace(CASE, averaging=AveragingSettings(tau=2))
    (center, *_) = ranks.run(before.num_ranks, save, before, case, str(tmp_path))
    for weights, shared in ranks.run(after.num_ranks, begin_at, after, case, str(tmp_path)):
        assert_same_by_name(weights, center, exactly=True)
        assert_same_by_name(shared, center, exactly=True)
    (path,) = tmp_path.glob(f"step-*{SAVED_AT}/model.safetensors")
    assert_same_by_name(load_file(path), center, exactly=True)


def save_async(world: World, plan: Plan, case: Case, folder: str) -> tuple[Weights, Weights]:
    run = open_run(world, plan, case)
    train_until(run, case, SAVED_AT)
    run.save(folder)
    found = copies(run.model_tensors()), copies(run._parts.shared_tensors())
    run.close()
    return found


def resume_async(world: World, plan: Plan, case: Case, folder: str) -> Any:
    run = open_run(world, plan, case)
    train_until(run, dataclasses.replace(case, num_steps=1), 1)  # its weights and centre are wrong
    assert run.load(folder)
    found = copies(run.model_tensors()), copies(run._parts.shared_tensors())
    world.barrier()  # whoever goes on moves the centre
    train_until(run, case, case.num_steps)
    metrics = run.exchanges()
    assert metrics is not None
    run.close()
    return (*found, metrics.num_exchanges)


@pytest.mark.parametrize("method", ["async_easgd", "async_sgd", "hogwild_easgd"])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "pipe": 2}], ids=str)
def test_workers_and_centre_of_an_asynchronous_run_are_saved(
    ranks: Ranks, tmp_path: Path, method: str, axes: dict[str, int]
) -> None:
    case = dataclasses.replace(CASE, dtype=torch.float32, averaging=AveragingSettings(tau=1))
    plan = planned(method, **axes)
    first = ranks.run(plan.num_ranks, save_async, plan, case, str(tmp_path))
    again = ranks.run(plan.num_ranks, resume_async, plan, case, str(tmp_path))
    for (weights, center), (found, found_center, num_exchanges) in zip(first, again, strict=True):
        assert_same_by_name(found_center, center, exactly=True)
        assert num_exchanges == case.num_steps
        # What was not yet pushed belongs to no version: such workers begin at the centre.
        assert_same_by_name(found, center if method == "async_sgd" else weights, exactly=True)


def save_apart(world: World, plan: Plan, case: Case, folder: str) -> int:
    """Save when each worker is at a step of its own, as after a request to stop."""
    run = open_run(world, plan, case)
    train_until(run, case, 2 + world.rank)
    run.save(folder)
    saved_at = run.step
    assert run.load(folder)
    assert run.step == 2
    run.close()
    return saved_at


def test_workers_at_different_steps_save_one_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    case = dataclasses.replace(CASE, dtype=torch.float32, averaging=AveragingSettings(tau=1))
    plan = planned("async_easgd", data=2)
    assert ranks.run(2, save_apart, plan, case, str(tmp_path)) == [2, 3]
    (path,) = tmp_path.glob("step-*")
    assert path.name.endswith("2")


def test_the_command_has_servers_and_resumes(tmp_path: Path) -> None:
    options = [*TINY, "--averaging.method", "async_easgd", "--averaging.tau", "2"]
    common = ["--nproc", "3", "--averaging.servers", "1", "--output.dir", "run"]
    first = ganglion("train", *options, *common, "--train.steps", "6", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "served part 0 of centre 0" in (tmp_path / "run/logs/rank2.log").read_text()
    again = ganglion("train", "--resume", *common, "--train.steps", "9", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    records = metrics_of(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 10))
    assert records[5]["exchanges"] == 3
    assert records[8]["exchanges"] == 5
    assert sum(records[5]["staleness"]) == 3
    assert "val_loss" in records[-1]


def test_the_command_trains_resumes_and_writes_metrics(tmp_path: Path) -> None:
    options = [*TINY, "--averaging.method", "sync_easgd", "--averaging.tau", "2"]
    first = ganglion(
        "train", *options, "--nproc", "2", "--output.dir", "run", "--train.steps", "6", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    records = metrics_of(tmp_path / "run")
    assert [record["exchanges"] for record in records] == [1, 1, 2, 2, 3, 3]
    assert all(record["consensus"] > 0 for record in records)
    assert records[0]["center_move"] < 1e-4  # all began there
    assert 1e-4 < records[2]["center_speed"] < records[2]["center_move"]
    assert all(record["force"] > 0 and record["step_norm"] > 0 for record in records[2:])
    assert records[-1]["exchange_bytes"] > records[0]["exchange_bytes"] > 0
    last = records[-1]
    assert (last["workers"], last["staleness_p99"], last["exchange_retries"]) == (2, 0, 0)
    assert last["center_age_s"] > 0
    assert "val_loss" in records[-1]


@pytest.mark.parametrize("servers", [0, 1])
def test_the_momentum_of_a_served_centre_is_resumed(tmp_path: Path, servers: int) -> None:
    """One worker has one order, so every loss must be that of the run without a stop."""
    common = [*TINY, "--averaging.method", "async_msgd", "--averaging.tau", "1"]
    common += ["--averaging.servers", str(servers), "--parallel.data", "1"]
    common += ["--nproc", str(1 + servers)]
    whole = ganglion("train", *common, "--output.dir", "whole", "--train.steps", "8", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    first = ganglion("train", *common, "--output.dir", "run", "--train.steps", "4", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = ["train", "--resume", "--output.dir", "run", "--train.steps", "8"]
    assert ganglion(*again, "--nproc", str(1 + servers), cwd=tmp_path).returncode == 0
    wanted, found = (
        [record["loss"] for record in metrics_of(tmp_path / name)] for name in ("whole", "run")
    )
    assert found == wanted
