"""Error feedback over real processes: saved and resumed to the last bit, warned of, refused."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ganglion import Plan
from ganglion.errors import CheckpointError
from ganglion.execute.comm import World, torch_world
from ganglion.execute.train import Run
from tests.support.command import TINY, ganglion, metrics_of, under_torchrun
from tests.support.harness import Ranks
from tests.support.pipelines import delayed, merged, plan_for
from tests.support.serial import TOLERANCE, History, assert_same_by_name, copies
from tests.support.training import FACTORIES, Case, make_batches, make_run, share_of

CASE = Case(
    dtype=torch.float32,
    num_steps=7,
    global_batch_size=16,
    max_grad_norm=0.3,
    error_feedback=True,
)
LATE = ("--parallel.schedule", "two_bw", "--train.threads", "1")


def open_run(world: World, plan: Plan, case: Case) -> Run:
    own = torch_world(world.rank, plan.mesh(), timeout_s=30.0)
    return make_run(own, plan, case)


def train_until(run: Run, plan: Plan, case: Case, until: int, history: History) -> None:
    batches = [share_of(batch, run.world, plan) for batch in make_batches(case)]
    for result in run.steps(batches[run.step :], until=until):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.weights = copies(run.model_tensors())


def train_whole(world: World, plan: Plan, case: Case) -> History:
    history = History()
    train_until(open_run(world, plan, case), plan, case, case.num_steps, history)
    return history


def stop_and_resume(world: World, plan: Plan, case: Case, at: int, folder: str) -> History:
    history = History()
    first = open_run(world, plan, case)
    train_until(first, plan, case, at, history)
    first.save(folder)
    return resume(world, plan, case, folder, history)


def resume(world: World, plan: Plan, case: Case, folder: str, history: History) -> History:
    second = open_run(world, plan, case)
    assert second.load(folder)
    train_until(second, plan, case, case.num_steps, history)
    return history


@pytest.mark.parametrize(
    ("optimizer", "model", "data", "at"),
    [
        ("sgd", "gpt", 1, 3),
        ("adamw", "gpt", 2, 4),
        ("adamw", "tied", 1, 1),
        ("muon", "tied", 1, 3),
    ],
)
def test_resuming_changes_no_bit(
    ranks: Ranks, tmp_path: Path, optimizer: str, model: str, data: int, at: int
) -> None:
    case = dataclasses.replace(CASE, optimizer=optimizer, model=model)
    plan = plan_for(case, "two_bw", 2, data, 4)
    whole = merged(ranks.run(plan.num_ranks, train_whole, plan, case), plan)
    found = ranks.run(plan.num_ranks, stop_and_resume, plan, case, at, str(tmp_path))
    resumed = merged(found, plan)
    assert resumed.losses == whole.losses
    assert resumed.norms == whole.norms
    assert_same_by_name(resumed.weights, whole.weights, exactly=True)


@pytest.mark.parametrize("optimizer", FACTORIES)
def test_two_stages_continue_as_four(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    """What is remembered goes by the names of the parameters, not by stages."""
    case = dataclasses.replace(CASE, optimizer=optimizer, dtype=torch.float64)
    two, four = (plan_for(case, "two_bw", pipe, 1, 4) for pipe in (2, 4))
    half = dataclasses.replace(case, num_steps=3)
    ranks.run(2, stop_and_resume, two, half, 3, str(tmp_path))
    found = merged(ranks.run(4, resume, four, case, str(tmp_path), History()), four)
    expected = delayed(case)
    assert found.losses == pytest.approx(expected.losses[3:], rel=TOLERANCE[case.dtype][0])
    assert_same_by_name(found.weights, expected.weights)


def refused(world: World, plan: Plan, case: Case, folder: str) -> str:
    first = open_run(world, plan, case)
    train_until(first, plan, case, 2, History())
    first.save(folder)
    other = dataclasses.replace(case, error_feedback=not case.error_feedback)
    with pytest.raises(CheckpointError) as caught:
        open_run(world, plan, other).load(folder)
    return str(caught.value)


@pytest.mark.parametrize(("then", "now"), [(True, "false"), (False, "true")])
def test_it_does_not_begin_or_end_half_way(
    ranks: Ranks, tmp_path: Path, then: bool, now: str
) -> None:
    case = dataclasses.replace(CASE, error_feedback=then)
    plan = plan_for(case, "two_bw", 2, 1, 4)
    for message in ranks.run(2, refused, plan, case, str(tmp_path)):
        assert f"optimizer.error_feedback = {str(then).lower()}, but it is {now} now" in message


def test_the_command_resumes_to_the_same_model(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    layers = [option if option != "1" else "2" for option in TINY]
    options = [*layers, *LATE, "--nproc", "2", "--parallel.pipe", "2", "--train.steps", "6"]
    options += ["--optimizer.error_feedback", "true", "--checkpoint.every", "3"]
    first = ganglion("train", *options, "--output.dir", str(whole), cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "warning" not in first.stderr
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step-00000006")
    for result in ("metrics.jsonl", "model.safetensors"):
        (part / result).unlink()
    rest = ganglion("train", "--resume", "--nproc", "2", "--output.dir", str(part), cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    losses = [[record["loss"] for record in metrics_of(folder)] for folder in (whole, part)]
    assert losses[0][3:] == losses[1]
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, part))
    assert_same_by_name(one, other, exactly=True)


def test_ranks_of_another_launcher_warn_once(tmp_path: Path) -> None:
    options = [*TINY, *LATE, "--parallel.pipe", "2", "--train.steps", "1", "--output.dir", "run"]
    result = under_torchrun(2, "-m", "ganglion", "train", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("one update late") == 1


def test_a_schedule_that_flushes_is_refused(tmp_path: Path) -> None:
    result = ganglion("train", *TINY, "--optimizer.error_feedback", "true", cwd=tmp_path)
    assert result.returncode == 2
    assert "optimizer.error_feedback = true" in result.stderr
    assert 'parallel.schedule = "one_f_one_b"' in result.stderr
    assert not (tmp_path / "runs").exists()
