"""Microbatches of different shape: given one by one, each counting the same, on every schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan
from ganglion.errors import DataError
from ganglion.execute.comm import World, run_threads
from ganglion.execute.models import cross_entropy
from ganglion.execute.pipeline.executor import Share
from tests.support.pipelines import FLUSHING, merged
from tests.support.serial import (
    Batch,
    History,
    assert_same_by_name,
    assert_same_gradients,
    assert_same_history,
    copies,
    train_delayed,
    train_serially,
)
from tests.support.training import (
    OPTIMIZERS,
    SHAPES,
    Case,
    Watch,
    make_batches,
    make_model,
    make_run,
    share_of,
)

CASE = Case(optimizer="sgd", num_steps=4)
LENGTHS = (8, 3, 5, 8, 1, 6)
Step = list[Batch]  # the microbatches of one rank


def steps_of(num_steps: int, m: int, first: int = 0) -> list[Step]:
    """Return microbatches of 1 to 3 sequences, all of one microbatch as long as its longest."""
    shape = SHAPES["gpt"]
    generator = torch.Generator().manual_seed(first)
    steps = []
    for step in range(num_steps):
        pairs = []
        for number in range(m):
            size = (1 + (number + first) % 3, LENGTHS[(step + number + first) % 6] + 1)
            ids = torch.randint(shape.vocab_size, size, generator=generator)  # type: ignore[union-attr]
            pairs.append((ids[:, :-1], ids[:, 1:]))
        steps.append(pairs)
    return steps


class EachAlone(nn.Module):
    """A model that takes a list of microbatches, for the oracle that knows nothing of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = [model]  # hidden in a list: names stay those of the model

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        return self.inner[0].named_parameters()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.inner[0].parameters()

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [self.inner[0](each) for each in inputs]


def mean_loss(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    losses = [cross_entropy(*pair) for pair in zip(outputs, targets, strict=True)]
    return torch.stack(losses).mean()


def serial(shares: list[list[Step]], *, delayed: bool = False) -> History:
    """Train on the microbatches of all ranks; each counts the same, however long it is."""
    batches = [
        tuple(zip(*(pair for step in together for pair in step), strict=True))
        for together in zip(*shares, strict=True)
    ]
    train = train_delayed if delayed else train_serially
    model = EachAlone(make_model(CASE))
    return train(model, mean_loss, OPTIMIZERS["sgd"], batches)  # type: ignore[arg-type]


def train(world: World, plan: Plan, shares: list[list[Step]]) -> History:
    return train_on(world, plan, CASE, shares[world.coordinates.data])


def train_on(world: World, plan: Plan, case: Case, batches: Sequence[Share]) -> History:
    watch, history = Watch(OPTIMIZERS["sgd"]), History()
    run = make_run(world, plan, case, watch=watch)
    for result in run.steps(batches):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.gradients = watch.gradients()
    history.weights = copies(run.model_tensors())
    return history


def assert_equals_serial(plan: Plan, *, delayed: bool = False) -> None:
    shares = [steps_of(4, plan.num_microbatches, first=3 * n) for n in range(plan.data)]
    expected = serial(shares, delayed=delayed)
    found = merged(run_threads(plan.mesh(), lambda world: train(world, plan, shares)), plan)
    assert_same_history(found, expected, CASE.dtype)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", FLUSHING)
def test_flushing_schedules(schedule: str, recompute: str) -> None:
    assert_equals_serial(Plan(pipe=2, schedule=schedule, num_microbatches=4, recompute=recompute))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_bw(recompute: str) -> None:
    plan = Plan(pipe=3, schedule="two_bw", num_microbatches=4, recompute=recompute)
    assert_equals_serial(plan, delayed=True)


@pytest.mark.parametrize("pipe", [1, 2])
def test_replicas_have_their_own_lengths(pipe: int) -> None:
    assert_equals_serial(Plan(data=2, pipe=pipe, num_microbatches=3))


def test_stash_takes_them_too() -> None:
    """Its first batch has seen no update: loss and gradients are the serial ones."""
    plan = Plan(pipe=2, schedule="stash", num_microbatches=4)
    shares = [steps_of(4, 4)]
    found = merged(run_threads(plan.mesh(), lambda world: train(world, plan, shares)), plan)
    expected = serial(shares)
    assert len(found.losses) == len(found.gradients) == 4
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-10)
    assert_same_gradients(found.gradients[:1], expected.gradients[:1])


@pytest.mark.parametrize("schedule", [*FLUSHING, "two_bw", "stash"])
def test_microbatches_given_are_those_cut_out_of_a_batch(schedule: str) -> None:
    plan = Plan(pipe=2, schedule=schedule, microbatch_size=2, num_microbatches=4)
    case = dataclasses.replace(CASE, global_batch_size=8)

    def body(world: World, one_by_one: bool) -> History:
        batches = [share_of(batch, world, plan) for batch in make_batches(case)]
        given = [list(zip(x.split(2), y.split(2), strict=True)) for x, y in batches]
        return train_on(world, plan, case, given if one_by_one else batches)

    found, expected = (
        merged(run_threads(plan.mesh(), lambda world, way=way: body(world, way)), plan)
        for way in (True, False)
    )
    assert found.losses == expected.losses
    assert_same_gradients(found.gradients, expected.gradients, exactly=True)
    assert_same_by_name(found.weights, expected.weights, exactly=True)


PAIR = (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([PAIR], "given 1 microbatches, but num_microbatches = 2"),
        ([], "given 0 microbatches, but num_microbatches = 2"),
        ([PAIR, PAIR[:1]], r"microbatch 1 of a step is no pair .* a tuple of \[\(1, 4\)\]"),
        ([PAIR, (PAIR[0], PAIR[1][:0])], r"a tuple of \[\(1, 4\), \(0, 4\)\]"),
        ([(PAIR[0][:0], PAIR[1][:0]), PAIR], "microbatch 0 of a step is no pair"),
        ([(PAIR[0], 3), PAIR], r"a tuple of \[\(1, 4\), 'int'\]"),
        ([None, PAIR], "but a NoneType"),
    ],
)
def test_what_is_no_list_of_microbatches_is_refused(given: list[object], message: str) -> None:
    plan = Plan(num_microbatches=2)

    def body(world: World) -> None:
        list(make_run(world, plan, CASE).steps([given]))  # type: ignore[list-item]

    with pytest.raises(DataError, match=message):
        run_threads(plan.mesh(), body)
