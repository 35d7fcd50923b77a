"""Training over real processes: equal to the serial model, overlapped or not, saved and resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ganglion import Plan
from ganglion.execute.comm import World
from ganglion.execute.models import cross_entropy
from ganglion.execute.train import Run
from tests.support.harness import Ranks
from tests.support.serial import TOLERANCE, History, assert_same_by_name, train_serially
from tests.support.training import (
    OPTIMIZERS,
    Case,
    make_batches,
    make_model,
    make_run,
    share_of,
    train_parallel,
)


def plan_for(data: int, num_microbatches: int, case: Case) -> Plan:
    size = case.global_batch_size // (data * num_microbatches)
    return Plan(data=data, microbatch_size=size, num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "case"),
    [
        (2, 1, Case()),
        (2, 4, Case(optimizer="sgd", max_grad_norm=0.05)),
        (2, 2, Case(model="tied")),
        (4, 2, Case()),
        (4, 1, Case(model="conv", dtype=torch.float32, optimizer="sgd")),
    ],
    ids=str,
)
def test_equals_serial(ranks: Ranks, num_ranks: int, num_microbatches: int, case: Case) -> None:
    expected = train_serially(
        make_model(case),
        cross_entropy,
        OPTIMIZERS[case.optimizer],
        make_batches(case),
        max_grad_norm=case.max_grad_norm,
    )
    plan = plan_for(num_ranks, num_microbatches, case)
    for history in ranks.run(num_ranks, train_parallel, plan, case):
        assert history.losses == pytest.approx(expected.losses, rel=TOLERANCE[case.dtype][0])
        assert history.norms == pytest.approx(expected.norms, rel=TOLERANCE[case.dtype][0])
        for actual, wanted in zip(history.gradients, expected.gradients, strict=True):
            assert_same_by_name(actual, wanted)
        assert_same_by_name(history.weights, expected.weights)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_overlap_never_changes_a_bit(ranks: Ranks, num_ranks: int) -> None:
    case = Case(dtype=torch.float32, num_steps=4)
    plan = plan_for(num_ranks, 2, case)
    overlapped: list[History] = ranks.run(num_ranks, train_parallel, plan, case)
    waited = ranks.run(num_ranks, train_parallel, plan, dataclasses.replace(case, overlap=False))
    for one, other in zip(overlapped, waited, strict=True):
        assert one.losses == other.losses
        assert_same_by_name(one.weights, other.weights, exactly=True)


def train_from(run: Run, world: World, plan: Plan, case: Case, until: int) -> list[float]:
    batches = [share_of(batch, world, plan) for batch in make_batches(case)]
    return [result.loss for result in run.steps(batches[run.step :], until=until)]


def stop_and_resume(world: World, plan: Plan, case: Case, folder: str) -> tuple[list[float], ...]:
    whole = train_from(make_run(world, plan, case), world, plan, case, until=6)
    first_run = make_run(world, plan, case)
    first = train_from(first_run, world, plan, case, until=3)
    first_run.save(folder)
    second_run = make_run(world, plan, case)
    assert second_run.load(folder)
    assert second_run.step == 3
    return whole, first + train_from(second_run, world, plan, case, until=6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_repeats_every_loss(ranks: Ranks, optimizer: str, tmp_path: Path) -> None:
    case = Case(dtype=torch.float32, num_steps=6, optimizer=optimizer)
    plan = plan_for(2, 2, case)
    for whole, resumed in ranks.run(2, stop_and_resume, plan, case, str(tmp_path)):
        assert resumed == whole


def save_on(world: World, plan: Plan, case: Case, folder: str) -> History:
    run = make_run(world, plan, case)
    train_from(run, world, plan, case, until=2)
    run.save(folder)
    history = History()
    history.losses = train_from(run, world, plan, case, until=4)
    return history


def load_on(world: World, plan: Plan, case: Case, folder: str) -> list[float]:
    run = make_run(world, plan, case)
    assert run.load(folder)
    return train_from(run, world, plan, case, until=4)


def test_a_checkpoint_of_two_ranks_continues_on_four(ranks: Ranks, tmp_path: Path) -> None:
    case = Case(num_steps=4)
    saved = ranks.run(2, save_on, plan_for(2, 2, case), case, str(tmp_path))
    loaded = ranks.run(4, load_on, plan_for(4, 1, case), case, str(tmp_path))
    assert loaded[0] == pytest.approx(saved[0].losses, rel=1e-9)


def stop_asked_by_one(world: World, plan: Plan, case: Case) -> list[bool]:
    run = make_run(world, plan, case)
    if world.rank == 1:
        run.request_stop()
    batches = [share_of(batch, world, plan) for batch in make_batches(case)]
    return [result.stop_requested for result in run.steps(batches[:1])]


def test_a_stop_asked_of_one_rank_is_known_to_all(ranks: Ranks) -> None:
    case = Case()
    assert ranks.run(2, stop_asked_by_one, plan_for(2, 1, case), case) == [[True], [True]]


def evaluate_samples(world: World, plan: Plan, case: Case) -> float:
    """Evaluate two global batches of samples that all differ."""
    inputs, targets = (torch.cat(parts) for parts in zip(*make_batches(case), strict=True))
    samples = list(zip(inputs, targets, strict=True))
    return make_run(world, plan, case).evaluate(samples, num_batches=2)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_evaluation_is_the_serial_mean_everywhere(ranks: Ranks, num_ranks: int) -> None:
    case = Case()
    with torch.no_grad():
        losses = [cross_entropy(make_model(case)(x), y).item() for x, y in make_batches(case)[:2]]
    assert losses[0] != losses[1]
    evaluated = ranks.run(num_ranks, evaluate_samples, plan_for(num_ranks, 2, case), case)
    assert evaluated == pytest.approx([sum(losses) / 2] * num_ranks, rel=1e-10)
