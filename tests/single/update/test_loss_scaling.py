"""An overflow anywhere skips the step everywhere, and nothing but the loss scale changes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import Tensor

from ganglion import Plan
from ganglion.decide.plan import FP16_MASTER
from ganglion.decide.schedules.loss_scale import LossScale
from ganglion.execute.comm import World, run_threads
from ganglion.execute.train import Run, StepResult
from ganglion.execute.update.policy import GradientPolicy
from tests.support.covering import by_name, cells
from tests.support.halves import Scale, train_in_half
from tests.support.pipelines import plan_for
from tests.support.serial import assert_same_by_name, copies
from tests.support.training import Case, make_batches, make_run, share_of

CASE = Case(num_steps=5, global_batch_size=16, dtype=torch.float32)
SPOILED = 2  # the batch in which a gradient overflows


@dataclass
class Seen:
    """What a rank saw: results, and the state after every step, or after the last one."""

    results: list[StepResult] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def scales(self) -> list[float | None]:
        return [result.loss_scale for result in self.results]

    @property
    def skipped(self) -> list[bool]:
        return [result.skipped for result in self.results]


def spoil(run: Run, plan: Plan, batch: int, value: float = math.inf) -> None:
    """Let the gradient of one parameter overflow in the second microbatch of a batch."""
    parameter = next(p for name, p in run._parts.parameters.items() if "norm.weight" in name)
    calls = [0]

    def hook(gradient: Tensor) -> Tensor:
        number, calls[0] = calls[0], calls[0] + 1
        is_bad = number == batch * plan.num_microbatches + 1
        return gradient * value if is_bad else gradient

    parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def state_of(run: Run) -> dict[str, Tensor]:
    """Return everything a step may change: masters, half weights, moments."""
    found = copies(run.model_tensors())
    found.update({f"half {n}": t for n, t in copies(run._parts.parameters).items()})
    for optimizer in run._parts.optimizers:
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                entries = copies(optimizer.state.get(parameter, {}))
                found.update({f"{entry} {name}": value for entry, value in entries.items()})
    return found


def train_spoiled(world: World, plan: Plan, case: Case, victim: int, value: float) -> Seen:
    run, seen = make_run(world, plan, case), Seen()
    if world.rank == victim:
        spoil(run, plan, SPOILED, value)
    for batch in make_batches(case):
        seen.results += run.steps([share_of(batch, world, plan)])
        seen.states.append(state_of(run))
    return seen


LAYOUTS = {
    "data": (Plan(data=2), 1),
    "first stage": (Plan(pipe=2), 0),
    "last stage of a replica": (Plan(pipe=2, data=2), 3),
    "chunks": (Plan(pipe=2, schedule="interleaved"), 0),
    "zero bubble": (Plan(pipe=2, schedule="zero_bubble"), 0),
    "x": (Plan(x=2), 1),
    "z": (Plan(z=2), 0),
    "x in a pipeline": (Plan(x=2, pipe=2), 2),
}


WHERE = by_name({name: plan for name, (plan, _) in LAYOUTS.items()})


@cells({"max_grad_norm, value": [(0.0, math.inf), (0.5, math.nan)]}, where=WHERE)
def test_one_rank_overflows_and_all_skip(where: str, max_grad_norm: float, value: float) -> None:
    plan, victim = LAYOUTS[where]
    model = "wide_gpt" if plan.x * plan.z > 1 else "gpt"
    case = dataclasses.replace(CASE, model=model, max_grad_norm=max_grad_norm)
    size = case.global_batch_size // (4 * plan.num_shares)
    plan = dataclasses.replace(
        plan, precision=FP16_MASTER, num_microbatches=4, microbatch_size=size
    )
    found = run_threads(plan.mesh(), lambda world: train_spoiled(world, plan, case, victim, value))
    for seen in found:
        assert seen.skipped == [step == SPOILED for step in range(5)]
        assert seen.scales == [2.0**16] * 3 + [2.0**15] * 2
        assert not math.isfinite(seen.results[SPOILED].grad_norm)
        assert_same_by_name(seen.states[SPOILED], seen.states[SPOILED - 1], exactly=True)
        for step in (SPOILED - 1, SPOILED + 1):
            before, after = seen.states[step - 1], seen.states[step]
            assert not any(torch.equal(before[n], after[n]) for n in run_names(after))


def run_names(state: dict[str, Tensor]) -> list[str]:
    """Return the names of masters of matrices: those that every step moves."""
    return [n for n, t in state.items() if " " not in n and t.ndim == 2 and "positions" not in n]


@pytest.mark.parametrize("victim", [0, 1])
def test_two_bw_skips_a_version_and_hears_of_it_a_batch_later(victim: int) -> None:
    plan = plan_for(CASE, "two_bw", 2, 1, 4, precision=FP16_MASTER)

    def body(world: World, spoiled: bool = True) -> Seen:
        run, seen = make_run(world, plan, CASE), Seen()
        if spoiled and world.rank == victim:
            spoil(run, plan, SPOILED)
        # In one go: batch 3 is under way when batch 2 is found to be bad.
        shares = (share_of(batch, world, plan) for batch in make_batches(CASE))
        seen.results += run.steps(shares)
        seen.states.append(state_of(run))
        return seen

    found = run_threads(plan.mesh(), body)
    for seen in found:
        assert seen.skipped == [False, False, True, False, False]
        assert seen.scales == [2.0**16] * 4 + [2.0**15]
    weights = {n: t for seen in found for n, t in seen.states[-1].items() if " " not in n}
    assert_same_by_name(weights, skipping_loop(), exactly=True)


def skipping_loop() -> dict[str, Tensor]:
    """Return the masters of a delayed loop in which the gradients of one batch are thrown away."""
    history = train_in_half(CASE, FP16_MASTER, 4, delay=1, spoiled=SPOILED)
    assert history.skipped == [False, False, True, False, False]
    return history.weights


@cells(schedule=["one_f_one_b", "two_bw"], pipe=[1, 2], max_grad_norm=[0.0, 0.5])
def test_scales_and_weights_of_true_overflows(
    monkeypatch: pytest.MonkeyPatch, schedule: str, pipe: int, max_grad_norm: float
) -> None:
    """A scale that is much too large overflows by itself, falls, and rises again."""
    rule = Scale(initial=2.0**24, patience=3)
    made = partial(LossScale, initial=rule.initial, patience=rule.patience)
    monkeypatch.setattr(import_module("ganglion.execute.train.parallelize"), "LossScale", made)
    case = dataclasses.replace(CASE, num_steps=10, max_grad_norm=max_grad_norm, optimizer="sgd")
    plan = plan_for(case, schedule, pipe, 1, 4, precision=FP16_MASTER)
    found = run_threads(plan.mesh(), lambda world: train_at_once(world, plan, case))
    delay = int(schedule == "two_bw")
    wanted = train_in_half(case, FP16_MASTER, 4, delay=delay, scale=rule)
    assert sum(wanted.skipped) >= 2 and max(wanted.scales[4:]) > min(wanted.scales)
    weights = {}
    for seen in found:
        assert seen.skipped == wanted.skipped
        assert seen.scales == wanted.scales
        weights.update({n: t for n, t in seen.states[-1].items() if " " not in n})
    if max_grad_norm == 0:
        assert_same_by_name(weights, wanted.weights, exactly=True)
    else:
        assert_same_by_name(weights, wanted.weights)


def train_at_once(world: World, plan: Plan, case: Case) -> Seen:
    run, seen = make_run(world, plan, case), Seen()
    seen.results += run.steps(share_of(batch, world, plan) for batch in make_batches(case))
    seen.states.append(state_of(run))
    return seen


def test_a_norm_that_is_no_number_is_an_overflow() -> None:
    policy = GradientPolicy(1.0, LossScale())
    decision = policy.decide(0, torch.tensor(math.nan, dtype=torch.float64))
    assert decision.is_skipped and decision.loss_scale == 2.0**16
    assert policy.scale_of(1) == 2.0**15


def test_the_factor_undoes_the_scale_and_clips() -> None:
    policy = GradientPolicy(1.0, LossScale(initial=1024.0))
    decision = policy.decide(0, torch.tensor(4 * 1024.0, dtype=torch.float64))
    assert float(decision.norm) == 4
    assert decision.factor is not None and float(decision.factor * 4096) == pytest.approx(
        1, rel=1e-6
    )
    small = policy.decide(1, torch.tensor(512.0, dtype=torch.float64))
    assert small.factor is not None and float(small.factor) == 1 / 1024


def test_without_a_scale_nothing_is_skipped() -> None:
    decision = GradientPolicy(0.0).decide(0, torch.tensor(math.inf))
    assert decision.factor is None and not decision.is_skipped and decision.loss_scale is None
