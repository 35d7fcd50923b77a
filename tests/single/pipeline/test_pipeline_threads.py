"""Pipelines equal the serial model: every schedule, depth and cut, with ranks as threads.

Schedules that flush are compared with plain training; those that never do with a serial loop that
has their delay written out. Every parameter is compared by its name, and so is its gradient at
every step, as the optimizer gets it.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn

from ganglion import parallelize
from ganglion.execute.comm import World, run_threads
from ganglion.execute.models import cross_entropy
from tests.support.covering import cells
from tests.support.pipelines import (
    CASE,
    FLUSHING,
    assert_equals,
    assert_equals_at_once,
    assert_equals_delayed,
    delayed,
    merged,
    plan_for,
    serial_of,
)
from tests.support.serial import History, assert_same_history, copies, load_weights, train_serially
from tests.support.training import (
    OPTIMIZERS,
    Case,
    Watch,
    make_batches,
    make_model,
    share_of,
    train_serial,
    train_traced,
)


@functools.cache
def serial(case: Case) -> History:
    return train_serial(case)


@cells(schedule=FLUSHING, pipe=[2, 3], m=[1, 2, 8])
def test_flushing_schedules_equal_serial(schedule: str, pipe: int, m: int) -> None:
    assert_equals(plan_for(CASE, schedule, pipe, 1, m), CASE, serial(CASE))


@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("m", [2, 8])
def test_flushing_schedules_with_replicas(schedule: str, m: int) -> None:
    assert_equals(plan_for(CASE, schedule, 2, 2, m), CASE, serial(CASE))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "message_driven", "zero_bubble"])
def test_four_stages_and_microbatches_that_do_not_fill_them(schedule: str) -> None:
    case = dataclasses.replace(CASE, global_batch_size=12)
    assert_equals(plan_for(case, schedule, 4, 1, 3), case, train_serial(case))


@pytest.mark.parametrize("cuts", [(1,), (3,), (5,)])
def test_uneven_cuts(cuts: tuple[int, ...]) -> None:
    plan = plan_for(CASE, "one_f_one_b", 2, 1, 4, stage_boundaries=cuts)
    assert_equals(plan, CASE, serial(CASE))


TYING = ("one_f_one_b", "zero_bubble", "zero_bubble_v", "interleaved", "message_driven")


@cells(schedule=TYING, data=[1, 2])
def test_tied_embeddings_are_summed_once(schedule: str, data: int) -> None:
    case = dataclasses.replace(CASE, model="tied", max_grad_norm=0.5)
    assert_equals(plan_for(case, schedule, 2, data, 4), case, serial(case))


class Scaled(nn.Module):
    """Two parameters that can be shared with another block."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((12,), 1.1, dtype=torch.float64))
        self.shift = nn.Parameter(torch.full((12,), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


def test_two_parameters_tied_between_the_same_stages() -> None:
    def blocks() -> nn.Sequential:
        first, last = Scaled(), Scaled()
        last.factor, last.shift = first.factor, first.shift
        middle = make_model(dataclasses.replace(CASE, model="mlp"))
        return nn.Sequential(first, *list(middle.blocks().values())[:1], nn.Linear(16, 12), last)

    case = dataclasses.replace(CASE, model="mlp", num_steps=2)
    torch.manual_seed(3)
    model = blocks().double()
    start = copies(dict(model.named_parameters()))
    expected = train_serially(model, cross_entropy, OPTIMIZERS["sgd"], make_batches(case))
    plan = plan_for(case, "one_f_one_b", 2, 1, 4, stage_boundaries=(2,))

    def body(world: World) -> History:
        mine = blocks().double()
        load_weights(dict(mine.named_parameters()), start)
        watch, history = Watch(OPTIMIZERS["sgd"]), History()
        run = parallelize(mine, cross_entropy, watch, plan, world=world)
        for result in run.steps(share_of(batch, world, plan) for batch in make_batches(case)):
            history.losses.append(result.loss)
            history.norms.append(result.grad_norm)
        history.gradients = watch.gradients()
        history.weights = copies(run.model_tensors())
        return history

    assert_same_history(merged(run_threads(plan.mesh(), body), plan), expected, case.dtype)


@pytest.mark.parametrize("model", ["mlp", "conv"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_v", "two_bw"])
def test_other_models(model: str, schedule: str) -> None:
    case = dataclasses.replace(CASE, model=model, num_steps=3)
    pipe = 1 if schedule == "zero_bubble_v" and model == "mlp" else 2
    plan = plan_for(case, schedule, pipe, 1, 4)
    assert_equals(plan, case, serial_of(plan, case))


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_clipping_by_the_global_norm(max_grad_norm: float, dtype: torch.dtype) -> None:
    case = dataclasses.replace(CASE, max_grad_norm=max_grad_norm, dtype=dtype)
    assert_equals(plan_for(case, "one_f_one_b", 3, 1, 4), case, train_serial(case))


# --- never flushing ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_two_bw_with_replicas_and_clipping(max_grad_norm: float) -> None:
    case = dataclasses.replace(CASE, max_grad_norm=max_grad_norm, num_steps=6)
    assert_equals_delayed(plan_for(case, "two_bw", 2, 2, 4), case)


def test_two_bw_with_tied_embeddings() -> None:
    case = dataclasses.replace(CASE, model="tied", max_grad_norm=0.3, num_steps=6)
    assert_equals_delayed(plan_for(case, "two_bw", 2, 1, 4), case)


def test_two_bw_batch_by_batch_is_the_same() -> None:
    """Draining after every batch changes nothing: versions go by batches, not by time."""
    case = dataclasses.replace(CASE, num_steps=6)
    assert_equals(plan_for(case, "two_bw", 2, 1, 4), case, delayed(case))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("m", [1, 2, 4])
def test_stash_equals_its_versions_written_out(optimizer: str, m: int) -> None:
    case = dataclasses.replace(CASE, optimizer=optimizer, num_steps=6)
    plan = plan_for(case, "stash", 2, 1, m, stage_boundaries=(3,))
    found = assert_equals_at_once(plan, case, serial_of(plan, case))
    if m == 1:
        assert found.losses != pytest.approx(train_serial(case).losses, rel=1e-6), (
            "there was no delay"
        )


def test_the_trace_has_the_step_of_every_action_and_message() -> None:
    """Under two_bw a batch is at work while the next has entered already."""
    case = dataclasses.replace(CASE, num_steps=4)
    plan = plan_for(case, "two_bw", 2, 1, 4)

    for _, events in run_threads(plan.mesh(), lambda world: train_traced(world, plan, case)):
        numbered = [e for e in events if e.microbatch >= 0]
        assert {e.kind for e in numbered} >= {"forward", "backward"}
        assert all(e.step == e.microbatch // 4 for e in numbered)
        assert all(e.stage in (0, 1) for e in numbered)
