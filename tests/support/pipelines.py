"""Helpers of pipeline tests: plans, serial loops with delays written out, and comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn

from ganglion import Plan
from ganglion.execute.comm import Faults, World, run_threads
from ganglion.execute.models import cross_entropy
from tests.support.serial import (
    History,
    assert_same_history,
    copies,
    gradients_of,
    load_weights,
    train_delayed,
)
from tests.support.simulated import run as simulated
from tests.support.training import (
    FACTORIES,
    OPTIMIZERS,
    Case,
    in_one_process,
    make_batches,
    make_model,
    train_parallel,
    train_serial,
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
    """Join the weights and gradients of the ranks of a pipeline.

    Tied weights and their gradients must agree, to the last bit, where several ranks hold them.
    """
    whole = dataclasses.replace(histories[0], gradients=[], weights={})
    whole.gradients = [{} for _ in range(max(len(history.gradients) for history in histories))]
    for history in histories:
        assert history.losses == histories[0].losses
        assert history.norms == histories[0].norms
        for step, gradients in enumerate(history.gradients):
            _join(whole.gradients[step], gradients, gradients_of(step))
        _join(whole.weights, history.weights, "")
    return whole


def _join(found: dict[str, Tensor], more: Mapping[str, Tensor], what: str) -> None:
    for name, tensor in more.items():
        assert torch.equal(found.setdefault(name, tensor), tensor), f"{what}{name} drifts apart"


def assert_equals(plan: Plan, case: Case, expected: History, faults: Faults | None = None) -> None:
    histories = run_threads(
        plan.mesh(), lambda world: train_parallel(world, plan, case), faults=faults
    )
    with naming_faults(faults):
        assert_same_history(merged(histories, plan), expected, case.dtype)


def serial_of(plan: Plan, case: Case) -> History:
    """Return the history of one process, with the delays of the schedule written out."""
    if plan.schedule == "stash":
        (boundary,) = plan.stage_boundaries
        return stashed(case, plan.pipe, plan.num_microbatches, boundary, plan.num_shares)
    return delayed(case) if plan.schedule == "two_bw" else train_serial(case)


def delayed(case: Case) -> History:
    """Return the history of a serial loop with the delay of two_bw; cached, so do not change it."""
    return _delayed(in_one_process(case))


@lru_cache(maxsize=32)
def _delayed(case: Case) -> History:
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


def assert_equals_at_once(
    plan: Plan, case: Case, expected: History, faults: Faults | None = None
) -> History:
    """Train all batches in one go and compare with `expected`; return the history."""
    histories = run_threads(
        plan.mesh(), lambda world: train_at_once(world, plan, case), faults=faults
    )
    found = merged(histories, plan)
    with naming_faults(faults):
        assert_same_history(found, expected, case.dtype)
    return found


@contextmanager
def naming_faults(faults: Faults | None) -> Iterator[None]:
    """Add the injected faults to the error of a comparison that fails, to repeat them."""
    try:
        yield
    except AssertionError as error:
        error.add_note(str(faults))
        raise


def assert_equals_delayed(plan: Plan, case: Case, faults: Faults | None = None) -> None:
    assert_equals_at_once(plan, case, delayed(case), faults)


def stashed(case: Case, pipe: int, m: int, boundary: int, num_shares: int = 1) -> History:
    """Weight stashing written out: every stage runs a microbatch with the version it began with.

    Which version that is comes from a simulation of the schedule; a stage is updated after its own
    batch, with the gradients that its own versions gave. Replicas do the same at the same time.
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
        parts = (_microbatches(each, m, num_shares) for each in (inputs, targets))
        for number, (part, target) in enumerate(zip(*parts, strict=True), start=batch * m):
            chosen = {n: versions[s][used[s, number]][n] for n, s in stage_of.items()}
            load_weights(named, chosen)
            loss = cross_entropy(model(part), target)
            (loss / m).backward()
            losses.append(loss.item())
        history.losses.append(sum(losses) / m)
        history.norms.append(nn.utils.clip_grad_norm_(named.values(), float("inf")).item())
        history.gradients.append(copies({n: p.grad for n, p in named.items()}))
        load_weights(named, {n: versions[s][-1][n] for n, s in stage_of.items()})
        optimizer.step()
        for stage in range(pipe):
            versions[stage].append(copies(named))
    history.weights = copies(named)
    return history


def _microbatches(samples: Tensor, m: int, num_shares: int) -> Tensor:
    """Cut a global batch into m parts, each with the microbatch of that number of all shares."""
    return samples.unflatten(0, (num_shares, m, -1)).transpose(0, 1).flatten(1, 2)


def _block_number(parameter: str, blocks: list[str]) -> int:
    return max(n for n, name in enumerate(blocks) if parameter.startswith(f"{name}."))
