"""Checkpoints of split models over real processes: saved in one layout, continued in another."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ganglion import Plan
from ganglion.decide.topology import Launch
from ganglion.errors import CheckpointError
from ganglion.execute.comm import World, open_world, torch_world
from ganglion.execute.train import Run
from tests.support.harness import Ranks
from tests.support.pipelines import delayed
from tests.support.serial import TOLERANCE, History, assert_same_by_name, copies
from tests.support.tensors import Held, whole
from tests.support.training import Case, make_batches, make_run, share_of, train_serial

CASE = Case(model="wide_gpt", max_grad_norm=0.5, num_steps=4)
SAVED_AT = 2
ONE = Plan()
PIPE = Plan(pipe=2, schedule="one_f_one_b")

PAIRS = [
    (Plan(x=2, z=2), dataclasses.replace(PIPE, z=2)),
    (Plan(x=2, z=2), ONE),
    (Plan(data=2), Plan(x=2, y=2)),
    (dataclasses.replace(PIPE, x=2), Plan(y=2, z=2)),
    (Plan(y=2, data=2), Plan(x=2, data=2)),
    (ONE, Plan(y=2, z=2)),
]


def named(plan: Plan) -> str:
    sizes = plan.mesh().sizes()
    return "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one"


def sized(plan: Plan, case: Case) -> Plan:
    """Return the plan with two microbatches of what the global batch leaves."""
    size = case.global_batch_size // (plan.num_shares * 2)
    return dataclasses.replace(plan, microbatch_size=size, num_microbatches=2)


def open_run(world: World, plan: Plan, case: Case) -> Run:
    own = world if plan.num_ranks == 1 else torch_world(world.rank, plan.mesh(), timeout_s=30.0)
    return make_run(own, plan, case)


def train_until(run: Run, case: Case, until: int) -> Held:
    """Train on and return what this rank saw and holds."""
    batches = [share_of(batch, run.world, run.plan) for batch in make_batches(case)]
    history = History()
    for result in run.steps(batches[run.step :], until=until):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    run.drain()
    history.weights = copies(run.model_tensors())
    return Held(history, run.placements(), run.world.coordinates, run.world.mesh)


def save_on(world: World, plan: Plan, case: Case, folder: str) -> Held:
    run = open_run(world, plan, case)
    held = train_until(run, case, SAVED_AT)
    run.save(folder)
    return held


def continue_on(world: World, plan: Plan, case: Case, folder: str) -> Held:
    run = make_run_of_other_weights(world, plan, case)
    assert run.load(folder)
    assert run.step == SAVED_AT
    return train_until(run, case, case.num_steps)


def make_run_of_other_weights(world: World, plan: Plan, case: Case) -> Run:
    """Return a run that has trained already: its weights, moments and gathered blocks are wrong."""
    run = open_run(world, plan, case)
    train_until(run, dataclasses.replace(case, num_steps=1), 1)
    return run


def spread(ranks: Ranks, plan: Plan, body: object, *args: object) -> list[Held]:
    """Run a body on the processes of a plan; alone, in this one."""
    if plan.num_ranks == 1:
        return [body(open_world(Launch(), plan.mesh()), plan, *args)]  # type: ignore[operator]
    return ranks.run(plan.num_ranks, body, plan, *args)  # type: ignore[arg-type]


@functools.cache
def serial(case: Case) -> History:
    return train_serial(dataclasses.replace(case, tensor=None))


def assert_continues(found: list[Held], expected: History, case: Case) -> None:
    relative = TOLERANCE[case.dtype][0]
    for held in found:
        assert held.history.losses == pytest.approx(expected.losses[SAVED_AT:], rel=relative)
        assert held.history.norms == pytest.approx(expected.norms[SAVED_AT:], rel=relative)
    weights = whole(found, [held.history.weights for held in found])
    assert_same_by_name(weights, expected.weights)


def assert_exported(folder: Path, saved: list[Held]) -> None:
    (path,) = folder.glob("step-*/model.safetensors")
    weights = whole(saved, [held.history.weights for held in saved])
    assert_same_by_name(load_file(path), weights, exactly=True)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=named)
def test_a_checkpoint_continues_in_another_layout(
    ranks: Ranks, tmp_path: Path, before: Plan, after: Plan
) -> None:
    before, after = sized(before, CASE), sized(after, CASE)
    saved = spread(ranks, before, save_on, CASE, str(tmp_path))
    assert_exported(tmp_path, saved)
    found = spread(ranks, after, continue_on, CASE, str(tmp_path))
    assert_continues(found, serial(CASE), CASE)


@pytest.mark.parametrize("model", ["wide_tied", "wide_conv"])
def test_shared_weights_and_convolutions_continue(ranks: Ranks, tmp_path: Path, model: str) -> None:
    case = dataclasses.replace(CASE, model=model)
    before, after = sized(Plan(x=2, z=2), case), sized(dataclasses.replace(PIPE, y=2), case)
    saved = spread(ranks, before, save_on, case, str(tmp_path))
    assert_exported(tmp_path, saved)
    assert_continues(spread(ranks, after, continue_on, case, str(tmp_path)), serial(case), case)


@pytest.mark.parametrize(
    ("before", "after"),
    [(Plan(x=2, z=2), dataclasses.replace(PIPE, z=2)), (Plan(y=2, z=2), ONE), (ONE, Plan(x=2))],
    ids=named,
)
def test_muon_continues_whether_its_matrices_are_split_or_not(
    ranks: Ranks, tmp_path: Path, before: Plan, after: Plan
) -> None:
    case = dataclasses.replace(CASE, optimizer="muon")
    before, after = sized(before, case), sized(after, case)
    spread(ranks, before, save_on, case, str(tmp_path))
    assert_continues(spread(ranks, after, continue_on, case, str(tmp_path)), serial(case), case)


def stop_and_resume(world: World, plan: Plan, case: Case, folder: str) -> tuple[Held, Held]:
    uninterrupted = open_run(world, plan, case)
    train_until(uninterrupted, case, SAVED_AT)
    uninterrupted.save(folder)
    resumed = continue_on(world, plan, case, folder)
    return train_until(uninterrupted, case, case.num_steps), resumed


def test_the_same_layout_repeats_every_bit(ranks: Ranks, tmp_path: Path) -> None:
    case = dataclasses.replace(CASE, dtype=torch.float32)
    plan = sized(Plan(x=2, z=2), case)
    for one, other in ranks.run(4, stop_and_resume, plan, case, str(tmp_path)):
        assert one.history.losses == other.history.losses
        assert_same_by_name(one.history.weights, other.history.weights, exactly=True)


def test_older_weights_and_error_feedback_continue(ranks: Ranks, tmp_path: Path) -> None:
    """What 2BW remembers is cut like the parameters too."""
    case = dataclasses.replace(CASE, error_feedback=True, max_grad_norm=0.0)
    before = sized(Plan(pipe=2, x=2, schedule="two_bw"), case)
    after = sized(Plan(pipe=2, z=2, schedule="two_bw"), case)
    saved = spread(ranks, before, save_on, case, str(tmp_path))
    assert_exported(tmp_path, saved)
    assert_continues(spread(ranks, after, continue_on, case, str(tmp_path)), delayed(case), case)


def refused(world: World, plan: Plan, case: Case, folder: str) -> tuple[str, bool]:
    """Return what loading says, and whether it left the weights alone."""
    run = open_run(world, plan, case)
    before = copies(run.model_tensors())
    with pytest.raises(CheckpointError) as caught:
        run.load(folder)
    after = run.model_tensors()
    return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)


def test_another_shape_is_refused_by_name_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Cut in two, a weight of twice the width has the shape that was saved."""
    one, split = sized(ONE, CASE), sized(Plan(x=2, y=2), CASE)
    spread(ranks, one, save_on, dataclasses.replace(CASE, model="wide_gpt"), str(tmp_path))
    other = dataclasses.replace(CASE, model="wide_tied")
    for message, unchanged in ranks.run(4, refused, split, other, str(tmp_path)):
        assert "model.embedding.tokens.weight (saved [64, 32] float64, here [64, 64]" in message
        assert unchanged


def test_a_damaged_shard_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    plan = sized(Plan(x=2, z=2), CASE)
    ranks.run(4, save_on, plan, CASE, str(tmp_path))
    shard = next(tmp_path.glob("step-*/shards/rank-00003.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    for message, unchanged in ranks.run(4, refused, plan, CASE, str(tmp_path)):
        assert "rank-00003.safetensors has CRC-32" in message
        assert unchanged
