"""Pipelines equal the serial model: every schedule, depth and cut, with ranks as threads.

Schedules that flush are compared with plain training; those that never do with a serial loop that
has their delay written out. Every parameter is compared by its name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan, parallelize
from ganglion.comm import Faults, World, run_threads
from ganglion.models import cross_entropy
from ganglion.trace import Event, Recorder
from tests.serial import (
    TOLERANCE,
    History,
    assert_same_by_name,
    copies,
    load_weights,
    train_delayed,
    train_serially,
)
from tests.simulated import run as simulated
from tests.training import (
    FACTORIES,
    OPTIMIZERS,
    Case,
    make_batches,
    make_model,
    share_of,
    train_parallel,
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


def serial(case: Case) -> History:
    return train_serially(
        make_model(case),
        cross_entropy,
        OPTIMIZERS[case.optimizer],
        make_batches(case),
        max_grad_norm=case.max_grad_norm,
    )


@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("pipe", [2, 3])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_flushing_schedules_equal_serial(schedule: str, pipe: int, m: int) -> None:
    assert_equals(plan_for(CASE, schedule, pipe, 1, m), CASE, serial(CASE))


@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("m", [2, 8])
def test_flushing_schedules_with_replicas(schedule: str, m: int) -> None:
    assert_equals(plan_for(CASE, schedule, 2, 2, m), CASE, serial(CASE))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "message_driven", "zero_bubble"])
def test_four_stages_and_microbatches_that_do_not_fill_them(schedule: str) -> None:
    case = dataclasses.replace(CASE, global_batch_size=12)
    assert_equals(plan_for(case, schedule, 4, 1, 3), case, serial(case))


@pytest.mark.parametrize("cuts", [(1,), (3,), (5,)])
def test_uneven_cuts(cuts: tuple[int, ...]) -> None:
    plan = plan_for(CASE, "one_f_one_b", 2, 1, 4, stage_boundaries=cuts)
    assert_equals(plan, CASE, serial(CASE))


@pytest.mark.parametrize(
    "schedule", ["one_f_one_b", "zero_bubble", "zero_bubble_v", "interleaved", "message_driven"]
)
@pytest.mark.parametrize("data", [1, 2])
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
        run = parallelize(mine, cross_entropy, OPTIMIZERS["sgd"], plan, world=world)
        history = History()
        for result in run.steps(share_of(batch, world, plan) for batch in make_batches(case)):
            history.losses.append(result.loss)
            history.norms.append(result.grad_norm)
        history.weights = copies(run.model_tensors())
        return history

    found = merged(run_threads(plan.mesh(), body), plan)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert_same_by_name(found.weights, expected.weights)


@pytest.mark.parametrize("model", ["mlp", "conv"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_v", "two_bw"])
def test_other_models(model: str, schedule: str) -> None:
    case = dataclasses.replace(CASE, model=model, num_steps=3)
    pipe = 1 if schedule == "zero_bubble_v" and model == "mlp" else 2
    expected = delayed(case) if schedule == "two_bw" else serial(case)
    assert_equals(plan_for(case, schedule, pipe, 1, 4), case, expected)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_clipping_by_the_global_norm(max_grad_norm: float, dtype: torch.dtype) -> None:
    case = dataclasses.replace(CASE, max_grad_norm=max_grad_norm, dtype=dtype)
    assert_equals(plan_for(case, "one_f_one_b", 3, 1, 4), case, serial(case))


# --- never flushing ----------------------------------------------------------------------------


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
    from tests.training import make_run

    run, history = make_run(world, plan, case), History()
    for result in run.steps(share_of(batch, world, plan) for batch in make_batches(case)):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.weights = copies(run.model_tensors())
    return history


def assert_equals_delayed(plan: Plan, case: Case, faults: Faults | None = None) -> None:
    expected = delayed(case)
    histories = run_threads(
        plan.mesh(), lambda world: train_at_once(world, plan, case), faults=faults
    )
    found = merged(histories, plan)
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE[case.dtype][0])
    assert found.norms == pytest.approx(expected.norms, rel=TOLERANCE[case.dtype][0])
    assert_same_by_name(found.weights, expected.weights)


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("m", [1, 2, 4])
def test_stash_equals_its_versions_written_out(optimizer: str, m: int) -> None:
    case = dataclasses.replace(CASE, optimizer=optimizer, num_steps=6)
    plan = plan_for(case, "stash", 2, 1, m, stage_boundaries=(3,))
    expected = stashed(case, 2, m, boundary=3)
    histories = run_threads(plan.mesh(), lambda world: train_at_once(world, plan, case))
    found = merged(histories, plan)
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE[case.dtype][0])
    assert_same_by_name(found.weights, expected.weights)
    if m == 1:
        assert found.losses != pytest.approx(serial(case).losses, rel=1e-6), "there was no delay"


def test_the_trace_has_the_step_of_every_action_and_message() -> None:
    """Under two_bw a batch is at work while the next has entered already."""
    case = dataclasses.replace(CASE, num_steps=4)
    plan = plan_for(case, "two_bw", 2, 1, 4)

    def body(world: World) -> list[Event]:
        recorder = Recorder(world.rank)
        run = parallelize(
            make_model(case),
            cross_entropy,
            OPTIMIZERS["sgd"],
            plan,
            world=world,
            recorder=recorder,
        )
        list(run.steps(share_of(batch, world, plan) for batch in make_batches(case)))
        return recorder.events()

    for events in run_threads(plan.mesh(), body):
        numbered = [e for e in events if e.microbatch >= 0]
        assert {e.kind for e in numbered} >= {"forward", "backward"}
        assert all(e.step == e.microbatch // 4 for e in numbered)
        assert all(e.stage in (0, 1) for e in numbered)
