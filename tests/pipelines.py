"""What tests of pipelines share: plans, serial loops with delays written out, and comparisons."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ganglion import Plan
from ganglion.comm import Faults, World, run_threads
from ganglion.models import cross_entropy
from tests.serial import (
    TOLERANCE,
    History,
    assert_same_by_name,
    copies,
    load_weights,
    train_delayed,
)
from tests.simulated import run as simulated
from tests.training import (
    FACTORIES,
    OPTIMIZERS,
    Case,
    make_batches,
    make_model,
    train_parallel,
    train_split_at_once,
)

FLUSHING = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v", "message_driven")
CASE = Case(num_steps=5, global_batch_size=16)


def plan_for(case: Case, schedule: str, pipe: int, data: int, m: int, **more: object) -> Plan:
    size = case.global_batch_size // (data * m)
    return Plan(
        data=data,
        pipe=pipe,
        schedule=schedule,
        microbatch_size=size,
        num_microbatches=m,
        **more,  # type: ignore[arg-type]
    )


def merged(histories: list[History], plan: Plan) -> History:
    """Join what the ranks of a pipeline hold; tied weights must agree where several hold them."""
    whole = dataclasses.replace(histories[0], gradients=[], weights={})
    for history in histories:
        assert history.losses == histories[0].losses
        assert history.norms == histories[0].norms
        for name, tensor in history.weights.items():
            if name in whole.weights:
                assert torch.equal(whole.weights[name], tensor), f"{name} drifts apart"
            whole.weights[name] = tensor
    return whole


def assert_equals(plan: Plan, case: Case, expected: History, faults: Faults | None = None) -> None:
    histories = run_threads(
        plan.mesh(), lambda world: train_parallel(world, plan, case), faults=faults
    )
    found = merged(histories, plan)
    relative = TOLERANCE[case.dtype][0]
    assert found.losses == pytest.approx(expected.losses, rel=relative)
    assert found.norms == pytest.approx(expected.norms, rel=relative)
    assert_same_by_name(found.weights, expected.weights)


def delayed(case: Case) -> History:
    return train_delayed(
        make_model(case),
        cross_entropy,
        FACTORIES[case.optimizer],
        make_batches(case),
        max_grad_norm=case.max_grad_norm,
        error_feedback=case.error_feedback,
    )


def train_at_once(world: World, plan: Plan, case: Case) -> History:
    """Train all batches in one go, so that a pipeline that never flushes really does not."""
    return train_split_at_once(world, plan, case).history


def assert_equals_delayed(plan: Plan, case: Case, faults: Faults | None = None) -> None:
    expected = delayed(case)
    histories = run_threads(
        plan.mesh(), lambda world: train_at_once(world, plan, case), faults=faults
    )
    found = merged(histories, plan)
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE[case.dtype][0])
    assert found.norms == pytest.approx(expected.norms, rel=TOLERANCE[case.dtype][0])
    assert_same_by_name(found.weights, expected.weights)


def stashed(case: Case, pipe: int, m: int, boundary: int) -> History:
    """Weight stashing written out: every stage runs a microbatch with the version it began with.

    Which version that is comes from a simulation of the schedule; a stage is updated after its own
    batch, with the gradients that its own versions gave.
    """
    model = make_model(case)
    named = dict(model.named_parameters())
    blocks = list(model.blocks())
    stage_of = {n: int(_block_number(n, blocks) >= boundary) for n in named}
    versions = [[copies(named)] for _ in range(pipe)]
    used = {
        (step.action.stage, step.action.index): step.version
        for step in simulated("stash", pipe, (m,) * case.num_steps).steps()
        if step.action.kind == "F"
    }
    optimizer = OPTIMIZERS[case.optimizer](list(model.named_parameters()))
    history = History()
    for batch, (inputs, targets) in enumerate(make_batches(case)):
        optimizer.zero_grad()
        losses = []
        pairs = zip(inputs.chunk(m), targets.chunk(m), strict=True)
        for number, (part, target) in enumerate(pairs, start=batch * m):
            chosen = {n: versions[s][used[s, number]][n] for n, s in stage_of.items()}
            load_weights(named, chosen)
            loss = cross_entropy(model(part), target)
            (loss / m).backward()
            losses.append(loss.item())
        history.losses.append(sum(losses) / m)
        load_weights(named, {n: versions[s][-1][n] for n, s in stage_of.items()})
        optimizer.step()
        for stage in range(pipe):
            versions[stage].append(copies(named))
    history.weights = copies(named)
    return history


def _block_number(parameter: str, blocks: list[str]) -> int:
    return max(n for n, name in enumerate(blocks) if parameter.startswith(f"{name}."))
