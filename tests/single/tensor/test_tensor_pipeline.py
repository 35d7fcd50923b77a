"""Pipelines of tensor groups equal the serial model, whatever the order of messages.

Compared are every weight and, at every step, every gradient as the optimizer gets it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ganglion import Plan, parallelize
from ganglion.execute.comm import Faults, World, run_threads
from ganglion.execute.models import cross_entropy
from ganglion.execute.tensor import TensorSettings
from ganglion.execute.update.optimizers import NamedParameters
from ganglion.trace import Recorder
from tests.support.covering import cells
from tests.support.pipelines import FLUSHING, delayed, naming_faults, plan_for, serial_of
from tests.support.serial import History
from tests.support.tensors import SETTINGS, Held, assert_same_histories
from tests.support.training import (
    MUON,
    Case,
    make_batches,
    make_model,
    make_run,
    share_of,
    train_serial,
    train_split_at_once,
)

CASE = Case(model="wide_tied", num_steps=3, global_batch_size=8, max_grad_norm=0.5)
pytestmark = pytest.mark.timeout(120)


def _assert_equals(plan: Plan, case: Case, wanted: History, faults: Faults | None = None) -> None:
    held: list[Held] = run_threads(
        plan.mesh(), lambda world: train_split_at_once(world, plan, case), faults=faults
    )
    with naming_faults(faults):
        assert_same_histories(held, wanted, case.dtype)


AXES = [{"x": 2}, {"y": 2}, {"z": 2}, {"x": 2, "z": 2}, {"y": 2, "data": 2}]


@cells(schedule=FLUSHING, axes=AXES)
def test_flushing_schedules_equal_the_serial_model(schedule: str, axes: dict[str, int]) -> None:
    shares = axes.get("z", 1) * axes.get("data", 1)
    case = dataclasses.replace(CASE, model="wide_gpt3", num_steps=2)
    plan = dataclasses.replace(plan_for(case, schedule, 2, shares, 4 // shares), data=1)
    _assert_equals(dataclasses.replace(plan, **axes), case, train_serial(case))


@cells(settings=SETTINGS, axes=AXES)
def test_two_bw_equals_the_delay_written_out(settings: str, axes: dict[str, int]) -> None:
    shares = axes.get("z", 1) * axes.get("data", 1)
    case = dataclasses.replace(CASE, tensor=SETTINGS[settings])
    plan = dataclasses.replace(plan_for(case, "two_bw", 2, shares, 8 // shares), data=1)
    _assert_equals(dataclasses.replace(plan, **axes), case, delayed(case))


@pytest.mark.parametrize("axes", AXES[3:], ids=str)
def test_stash_equals_its_versions_written_out(axes: dict[str, int]) -> None:
    shares = axes.get("z", 1) * axes.get("data", 1)
    case = dataclasses.replace(CASE, model="wide_gpt3", max_grad_norm=0.0)
    plan = plan_for(case, "stash", 2, shares, 4 // shares, stage_boundaries=(4,))
    plan = dataclasses.replace(plan, **{"data": 1, **axes})
    _assert_equals(plan, case, serial_of(plan, case))


def test_muon_gets_the_pieces_of_every_gradient() -> None:
    """It gathers matrices itself, from gradients that are cut as the weights are."""
    case = dataclasses.replace(CASE, optimizer="muon")
    plan = dataclasses.replace(plan_for(case, "two_bw", 2, 2, 4), data=1, y=2, z=2)
    _assert_equals(plan, case, serial_of(plan, case))


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("schedule", ["message_driven", "two_bw"])
def test_20_runs_with_delays_and_reordering_change_nothing(schedule: str, seeds: range) -> None:
    plan = dataclasses.replace(plan_for(CASE, schedule, 2, 2, 4), data=1, y=2, z=2)
    wanted = serial_of(plan, CASE)
    for seed in seeds:
        faults = Faults(seed=seed, delay_s=0.001, reorder=True)
        _assert_equals(plan, CASE, wanted, faults)


def _count_sums(world: World, plan: Plan, case: Case) -> tuple[int, int]:
    """Return how often gradients were summed over z, and how many weights are cut along it."""
    recorder = Recorder(world.rank)
    run = make_run(world, plan, case, recorder=recorder)
    for _ in run.steps(share_of(batch, world, plan) for batch in make_batches(case)):
        pass
    places = [run.placements()[name] for name in run.model_tensors()]
    cut = [place for place in places if any(shard.axis == "z" for shard in place.shards)]
    return sum(event.kind.endswith("reduce_scatter") for event in recorder.events()), len(cut)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "two_bw"])
def test_stages_keep_some_weights_of_their_own(schedule: str) -> None:
    """A budget is that of a rank: each stage keeps what comes first in it."""
    case = dataclasses.replace(CASE, tensor=TensorSettings(keep_bytes=60_000))
    plan = dataclasses.replace(plan_for(case, schedule, 2, 2, 4), data=1, z=2)
    _assert_equals(plan, case, serial_of(plan, case))
    kept = run_threads(plan.mesh(), lambda world: kept_of(world, plan, case))
    for rank, (names, mine) in enumerate(kept):
        assert names and names < mine, f"rank {rank} keeps {names} of {mine}"


def kept_of(world: World, plan: Plan, case: Case) -> tuple[set[str], set[str]]:
    with make_run(world, plan, case) as run:
        report = run.tensor_report()
        assert report is not None
        return set(report.kept), set(run.model_tensors())


def test_stages_of_one_rank_sum_their_own_gradients() -> None:
    """Kept weights are summed at the end of a batch, at which the other chunks are not yet."""
    case = Case(model="wide_gpt3", num_steps=3, max_grad_norm=0.5, tensor=SETTINGS["kept"])
    plan = dataclasses.replace(plan_for(case, "interleaved", 2, 2, 4), data=1, z=2, chunks=3)
    _assert_equals(plan, case, train_serial(case))
    for num_sums, num_weights in run_threads(
        plan.mesh(), lambda world: _count_sums(world, plan, case)
    ):
        assert num_sums == num_weights * case.num_steps


def test_hooks_on_muon_stay_when_its_matrices_are_split() -> None:
    """Another optimizer takes the place of torch's: what a factory registered moves with it."""
    case = Case(model="wide_gpt", optimizer="muon", num_steps=3)
    plan = dataclasses.replace(plan_for(case, "one_f_one_b", 2, 1, 4), x=2)
    for calls in run_threads(plan.mesh(), lambda world: _calls_of_hooks(world, plan, case)):
        assert calls == ["before", "after"] * 2


def _calls_of_hooks(world: World, plan: Plan, case: Case) -> list[str]:
    """Train two steps with both kinds of hooks and a third without; return what was called."""
    calls: list[str] = []
    handles: list[RemovableHandle] = []

    def factory(named: NamedParameters) -> Sequence[Optimizer]:
        muon, rest = MUON(named)
        handles.append(muon.register_step_pre_hook(lambda *_: calls.append("before")))
        handles.append(muon.register_step_post_hook(lambda *_: calls.append("after")))
        return [muon, rest]

    run = parallelize(make_model(case), cross_entropy, factory, plan, world=world)
    *first, last = (share_of(batch, world, plan) for batch in make_batches(case))
    list(run.steps(first))
    for handle in handles:
        handle.remove()
    list(run.steps([last]))
    return calls


def test_a_run_tells_what_was_split() -> None:
    plan = dataclasses.replace(plan_for(CASE, "one_f_one_b", 2, 1, 4), x=2)
    lines = run_threads(
        plan.mesh(), lambda world: str(make_run(world, plan, CASE).tensor_report()).splitlines()
    )
    assert all(line.startswith(("split  ", "whole  ")) for line in lines[0])
    assert any("attention" in line or "mlp" in line for line in lines[0])
