"""Trouble in pipelines: late, lost and doubled messages, dead ranks and failing actions.

Delays and reordering change nothing, on any schedule. Everything else ends in an error that names
what happened, on every rank, and nobody waits for ever.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.schedules.pipeline.action import FORWARD, Message
from ganglion.errors import CommError, GanglionError, PeerLost, PipelineError, ProtocolError
from ganglion.execute.comm import Faults, World, run_threads
from ganglion.execute.comm.local.transport import LocalTransport
from ganglion.execute.models import cross_entropy
from ganglion.execute.pipeline.engine.ledger import Ledger
from tests.support.covering import cells
from tests.support.pipelines import (
    CASE,
    FLUSHING,
    assert_equals,
    assert_equals_at_once,
    plan_for,
    serial_of,
)
from tests.support.training import OPTIMIZERS, Case, make_batches, make_model, share_of

SCHEDULES = (*FLUSHING, "two_bw", "stash")
SMALL = dataclasses.replace(CASE, num_steps=2, global_batch_size=4)
PATIENCE_S = 3.0  # for what never comes; what is only late on a busy machine comes before
# Whoever loses patience first says what it awaits; the end of a batch awaits everybody.
AWAITED = r"waited 0.3 s for the ((activations|gradient) of microbatch \d+|reduction|numbers) "

pytestmark = pytest.mark.timeout(60)


# --- messages that are late --------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 25), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_25_runs_with_delays_and_reordering_change_nothing(schedule: str, seeds: range) -> None:
    """With 8 schedules these are 200 runs; chunks need twice the stages."""
    pipe = 2 if schedule in ("interleaved", "zero_bubble_v", "stash") else 3
    cuts = (3,) if schedule == "stash" else ()
    plan = plan_for(SMALL, schedule, pipe, 1, 4, stage_boundaries=cuts)
    expected = serial_of(plan, SMALL)
    for seed in seeds:
        faults = Faults(seed=seed, delay_s=0.001, reorder=True)
        assert_equals_at_once(plan, SMALL, expected, faults)


def test_delays_do_not_change_the_versions_that_stash_keeps() -> None:
    """With batches of one, every turn missed would show as other weights."""
    case = dataclasses.replace(SMALL, num_steps=6)
    plan = plan_for(case, "stash", 2, 1, 1, stage_boundaries=(3,))
    expected = serial_of(plan, case)
    for seed in range(15):
        faults = Faults(seed=seed, delay_s=0.004, reorder=True)
        assert_equals_at_once(plan, case, expected, faults)


@pytest.mark.parametrize("schedule", ["message_driven", "two_bw", "zero_bubble"])
def test_delays_with_replicas_and_tied_weights(schedule: str) -> None:
    case = dataclasses.replace(SMALL, model="tied", max_grad_norm=0.5)
    plan = plan_for(case, schedule, 2, 2, 2)
    expected = serial_of(plan, case)
    for seed in range(5):
        assert_equals(plan, case, expected, Faults(seed=seed, delay_s=0.001, reorder=True))


# --- messages that are lost or doubled, ranks that die -----------------------------------------


def outcomes(
    plan: Plan,
    case: Case,
    faults: Faults | None = None,
    *,
    build: Callable[[World], dict[str, Any]] = lambda world: {},
    errors: tuple[type[Exception], ...] = (CommError,),
) -> list[GanglionError]:
    """Train and return how it ended on each rank; a rank that ends without an error fails."""

    def body(world: World) -> GanglionError:
        parts: dict[str, Any] = {
            "blocks": make_model(case),
            "loss_fn": cross_entropy,
            "optimizer_factory": OPTIMIZERS["sgd"],
            "timeout_s": 30.0,
        }
        parts.update(build(world))
        settings = RunSettings(timeout_s=parts.pop("timeout_s"))
        run = parallelize(**parts, plan=plan, settings=settings, world=world)
        with pytest.raises(errors) as caught:
            list(run.steps(share_of(batch, world, plan) for batch in make_batches(case)))
        assert isinstance(caught.value, GanglionError)
        return caught.value

    return run_threads(plan.mesh(), body, timeout_s=20.0, faults=faults)


@pytest.fixture
def copies_of(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
    """Say how many copies of a message arrive, by its kind and microbatch."""
    wanted: dict[tuple[str, int], int] = {}
    deliver = LocalTransport._carry

    def chosen(self: LocalTransport, target: int, kind: str, tensor: Tensor, numbers: Any) -> None:
        for _ in range(wanted.get((kind, numbers[2]), 1)):
            deliver(self, target, kind, tensor, numbers)

    monkeypatch.setattr(LocalTransport, "_carry", chosen)
    return wanted


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_lost_message_is_awaited_for_a_while_and_named(schedule: str) -> None:
    plan = plan_for(SMALL, schedule, 2, 1, 4)
    brief = {"timeout_s": 0.3}  # whatever is awaited, it is named
    for error in outcomes(plan, SMALL, Faults(seed=1, drop=0.3), build=lambda world: brief):
        assert isinstance(error, PeerLost)
        assert re.search(AWAITED, str(error)), error


@pytest.mark.parametrize(
    ("kind", "name"), [("forward", "the activations"), ("backward", "the gradient")]
)
def test_what_is_awaited_is_what_was_lost(
    copies_of: dict[tuple[str, int], int], kind: str, name: str
) -> None:
    copies_of[kind, 2] = 0
    plan = plan_for(SMALL, "one_f_one_b", 2, 1, 4)
    stage = 1 if kind == "forward" else 0

    def build(world: World) -> dict[str, Any]:
        return {"timeout_s": PATIENCE_S} if world.rank == stage else {}

    for error in outcomes(plan, SMALL, build=build):
        assert f"{name} of microbatch 2 for stage {stage}" in str(error)


def test_a_lost_tied_gradient_is_no_hang(copies_of: dict[tuple[str, int], int]) -> None:
    copies_of["tied", 0] = 0
    case = dataclasses.replace(SMALL, model="tied")
    plan, brief = plan_for(case, "one_f_one_b", 2, 1, 4), {"timeout_s": PATIENCE_S}
    for error in outcomes(plan, case, build=lambda world: brief):
        assert isinstance(error, PeerLost)
        assert re.search(r"waited 3 s for the reduction of stage [01], batch 0", str(error)), error


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_message_that_comes_twice_is_refused(
    copies_of: dict[tuple[str, int], int], schedule: str, kind: str
) -> None:
    copies_of[kind, 1] = 2
    for error in outcomes(plan_for(SMALL, schedule, 2, 1, 4), SMALL):
        assert isinstance(error, ProtocolError)
        assert re.search(rf"sent {kind}, step 0, stage \d, microbatch 1,.*come before", str(error))


def test_a_message_of_a_batch_that_is_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy comes a batch later: the ledger has forgotten it, but not the batch."""
    deliver, kept = LocalTransport._carry, []

    def late(self: LocalTransport, target: int, kind: str, tensor: Tensor, numbers: Any) -> None:
        if kind == "forward" and numbers[2] == 0:
            kept.append((self, target, kind, tensor.clone(), numbers))
        if kind == "forward" and numbers[2] == 5:
            deliver(*kept[0])
        deliver(self, target, kind, tensor, numbers)

    monkeypatch.setattr(LocalTransport, "_carry", late)
    for error in outcomes(plan_for(SMALL, "one_f_one_b", 2, 1, 4), SMALL):
        assert isinstance(error, ProtocolError)
        assert "microbatch 0" in str(error)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("posts", [0, 3])
def test_a_dead_rank_is_named_by_all_others(schedule: str, posts: int) -> None:
    plan = plan_for(SMALL, schedule, 2, 1, 4)
    for error in outcomes(plan, SMALL, Faults(fail_after=(1, posts))):
        assert isinstance(error, PeerLost)
        assert "rank 1 is gone" in str(error)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw"])
def test_a_dead_rank_is_named_in_the_other_replica(schedule: str) -> None:
    plan = plan_for(SMALL, schedule, 2, 2, 2)
    dead = plan.num_ranks - 1
    for error in outcomes(plan, SMALL, Faults(fail_after=(dead, 1))):
        assert isinstance(error, PeerLost)
        assert f"rank {dead} is gone" in str(error)


# --- actions that fail -------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    """Fails on the way forward or back, at a given call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_way_back: bool) -> Tensor:
        ctx.on_way_back = on_way_back
        if not on_way_back:
            raise ValueError("broken on purpose")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise ValueError("broken on purpose")


class FailsAt(nn.Module):
    """Lets `count` microbatches pass, then fails."""

    def __init__(self, count: int, on_way_back: bool) -> None:
        super().__init__()
        self.count = count
        self.on_way_back = on_way_back

    def forward(self, x: Tensor) -> Tensor:
        self.count -= 1
        return x if self.count >= 0 else Failing.apply(x, self.on_way_back)


class FailingSGD(torch.optim.SGD):
    """Fails at the second update."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            raise ValueError("broken on purpose")
        return super().step(closure)


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("broken on purpose")


def broken_parts(what: str) -> dict[str, Any]:
    """Return the parts of a run of which one fails."""
    blocks = list(make_model(SMALL).blocks().values())  # type: ignore[operator]
    if what in ("forward", "backward"):
        broken = FailsAt(1, on_way_back=what == "backward")
        return {"blocks": [*blocks[:3], broken, *blocks[3:]]}
    passing = [*blocks[:3], FailsAt(1000, False), *blocks[3:]]
    if what == "update":
        return {"blocks": passing, "optimizer_factory": lambda named: FailingSGD(named, lr=0.1)}
    return {"blocks": passing, "loss_fn": failing_loss}


FAILURES = {
    "forward": "forward of stage 1, microbatch 1 failed on rank {}",
    "backward": "backward of stage 1, microbatch 1 failed on rank {}",
    "loss": "forward of stage 1, microbatch 0 failed on rank {}",
    "update": "update of stage 1, batch 1 failed on rank {}",
}


@cells(
    schedule=["one_f_one_b", "zero_bubble", "two_bw", "message_driven"],
    data=[1, 2],
    what=FAILURES,
)
def test_a_failing_action_is_named_on_every_rank(schedule: str, data: int, what: str) -> None:
    case = dataclasses.replace(SMALL, num_steps=4)
    plan = plan_for(case, schedule, 2, data, 2, stage_boundaries=(2,))
    failing = plan.num_ranks - 1  # stage 1 of the last replica

    def build(world: World) -> dict[str, Any]:
        whole = broken_parts("nothing") | {"loss_fn": cross_entropy}
        return broken_parts(what) if world.rank == failing else whole

    for error in outcomes(plan, case, build=build, errors=(PipelineError,)):
        assert FAILURES[what].format(failing) in str(error)
        assert "ValueError: broken on purpose" in str(error)


def test_an_error_of_our_own_keeps_its_class_and_gets_a_place() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    blocks = list(make_model(SMALL).blocks().values())  # type: ignore[operator]
    plan = plan_for(SMALL, "one_f_one_b", 2, 1, 4, stage_boundaries=(3,))

    def build(world: World) -> dict[str, Any]:
        return {"blocks": [*blocks[:2], Pair(), *blocks[2:]]}

    for error in outcomes(plan, SMALL, build=build, errors=(GanglionError,)):
        assert "forward of stage 0, microbatch 0 failed on rank 0: stage 0 ends with" in str(error)


def test_a_missing_gradient_is_that_of_its_own_stage() -> None:
    """A rank may hold several stages, which have come to different microbatches."""
    ledger = Ledger([0, 2], num_stages=4)
    ledger.admit(8)
    for microbatch in range(8):
        assert ledger.is_awaited(Message(FORWARD, 2, microbatch, 0))
    ledger.went_forward(0, 7)
    ledger.went_forward(2, 3)
    assert ledger.awaited() == (
        "the gradient of microbatch 7 for stage 0 or the gradient of microbatch 3 for stage 2"
    )
