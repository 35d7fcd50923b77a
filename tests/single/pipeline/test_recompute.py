"""Recomputation changes memory and time, never a number: equal to no recomputation to the bit."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ganglion import Plan, parallelize
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError, GanglionError
from ganglion.execute.comm import World, run_threads
from ganglion.execute.pipeline import (
    Chain,
    Stage,
    StageSettings,
    WeightStore,
    defer_weight_gradients,
)
from tests.support.covering import cells
from tests.support.pipelines import CASE, FLUSHING, merged, plan_for, train_at_once
from tests.support.serial import Batch, History, assert_same_by_name, copies
from tests.support.training import OPTIMIZERS, Case, share_of

SCHEDULES = (*FLUSHING, "two_bw", "stash")
SHORT = dataclasses.replace(CASE, num_steps=3, global_batch_size=8)


def trained(plan: Plan, case: Case) -> History:
    return merged(run_threads(plan.mesh(), lambda world: train_at_once(world, plan, case)), plan)


def assert_same_history(found: History, expected: History) -> None:
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert_same_by_name(found.weights, expected.weights, exactly=True)


def assert_recompute_changes_nothing(plan: Plan, case: Case) -> None:
    again = dataclasses.replace(plan, recompute="full")
    assert_same_history(trained(again, case), trained(plan, case))


PIPELINES = [
    *((schedule, pipe) for schedule in SCHEDULES for pipe in (2, 3)),
    *((schedule, 1) for schedule in ("one_f_one_b", "two_bw", "stash")),
]


@cells({"schedule, pipe": PIPELINES}, dtype=[torch.float64, torch.float32])
def test_equal_to_the_bit(schedule: str, pipe: int, dtype: torch.dtype) -> None:
    clip = 0.0 if schedule == "stash" else 0.3
    case = dataclasses.replace(SHORT, dtype=dtype, max_grad_norm=clip)
    assert_recompute_changes_nothing(plan_for(case, schedule, pipe, 1, 4), case)


@cells(model=["tied", "conv", "mlp"], schedule=["one_f_one_b", "zero_bubble", "two_bw"])
def test_other_models_are_equal_too(model: str, schedule: str) -> None:
    case = dataclasses.replace(SHORT, model=model, dtype=torch.float32)
    assert_recompute_changes_nothing(plan_for(case, schedule, 2, 1, 4), case)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("model", ["gpt", "tied"])
def test_replicas_reduce_while_backward_recomputes(model: str, overlap: bool) -> None:
    """Shared weights become final once, although two nodes of the graph use them."""
    case = dataclasses.replace(SHORT, model=model, overlap=overlap, dtype=torch.float32)
    assert_recompute_changes_nothing(plan_for(case, "one_f_one_b", 1, 2, 2), case)


@pytest.mark.parametrize("pipe", [1, 2])
def test_autocast_is_the_same_in_the_second_forward(pipe: int) -> None:
    case = dataclasses.replace(SHORT, dtype=torch.float32)
    assert_recompute_changes_nothing(
        plan_for(case, "one_f_one_b", pipe, 1, 2, precision="bf16"), case
    )


# --- models of one's own -------------------------------------------------------------------------


class Dropped(nn.Module):
    """A block that draws random numbers in two places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(self.linear(F.dropout(x, 0.3))), 0.3)


def regression(num_steps: int, size: int, width: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    shape = (num_steps, 2, size, width)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return [(inputs.clone(), targets.clone()) for inputs, targets in drawn]


def made(build: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        return [block.double() for block in build()]


def train_blocks(build: Callable[[], list[nn.Module]], plan: Plan, num_steps: int = 3) -> History:
    """Train on one thread: all ranks of a process draw from one random generator."""
    assert plan.num_ranks == 1

    def body(world: World) -> History:
        run = parallelize(made(build), F.mse_loss, OPTIMIZERS["adamw"], plan, world=world)
        history = History()
        for result in run.steps(
            share_of(batch, world, plan) for batch in regression(num_steps, plan.share_size)
        ):
            history.losses.append(result.loss)
            history.norms.append(result.grad_norm)
        history.weights = copies(run.model_tensors())
        return history

    return run_threads(plan.mesh(), body)[0]


def assert_blocks_train_the_same(build: Callable[[], list[nn.Module]], schedule: str) -> History:
    plan = Plan(schedule=schedule, microbatch_size=3, num_microbatches=4)
    plain = train_blocks(build, plan)
    assert_same_history(train_blocks(build, dataclasses.replace(plan, recompute="full")), plain)
    return plain


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw"])
def test_dropout_draws_the_same_masks_again(schedule: str) -> None:
    assert_blocks_train_the_same(
        lambda: [nn.Linear(8, 8), Dropped(8), Dropped(8), nn.Linear(8, 8)], schedule
    )


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw"])
def test_running_statistics_count_a_microbatch_once(schedule: str) -> None:
    def build() -> list[nn.Module]:
        return [nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), Dropped(8), nn.BatchNorm1d(8)]

    history = assert_blocks_train_the_same(build, schedule)
    assert history.weights["1.num_batches_tracked"] == 3 * 4


def test_buffers_that_a_forward_reads_and_changes_are_found_as_they_were() -> None:
    """A spectral norm turns its vectors in every forward and divides the weights by what it finds;
    several microbatches are in flight when the first of them is computed again."""

    def build() -> list[nn.Module]:
        normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8), n_power_iterations=1)
        return [nn.Linear(8, 8), normed, nn.Linear(8, 8)]

    results = []
    for recompute in (False, True):
        chain, blocks = chain_of(made(build), recompute=recompute)
        losses = [chain.forward(*pair, _no_seed) for pair in regression(3, 4)]
        for loss in losses:
            loss.backward()
        results.append((losses, tensors_of(blocks)))
    (losses, plain), (again, recomputed) = results
    assert losses == again
    assert_same_by_name(recomputed, plain, exactly=True)


def _no_seed(block: int) -> None:
    pass


def chain_of(blocks: list[nn.Module], *, recompute: bool) -> tuple[Chain, nn.Sequential]:
    return Chain(
        blocks, loss_fn=F.mse_loss, segments=singles(blocks) if recompute else ()
    ), nn.Sequential(*blocks)


def singles(blocks: list[nn.Module]) -> list[range]:
    """Return every block as a segment of its own."""
    return [range(number, number + 1) for number in range(len(blocks))]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name} gradient": p.grad for name, p in model.named_parameters()}
    return copies({**gradients, **model.state_dict()})


def test_evaluation_between_the_two_forwards_learns_what_changes_anew() -> None:
    """Statistics that were frozen in the first forward of all may move later."""
    blocks = made(lambda: [nn.Linear(8, 8), nn.BatchNorm1d(8)])
    chain, model = chain_of(blocks, recompute=True)
    ((inputs, targets),) = regression(1, 4)
    model.eval()
    chain.forward(inputs, targets, _no_seed).backward()
    model.train()
    chain.forward(inputs, targets, _no_seed).backward()
    assert model.state_dict()["1.num_batches_tracked"] == 1


def test_a_frozen_beginning_is_run_once() -> None:
    runs = Counted()
    blocks: list[nn.Module] = [nn.Linear(8, 8).double(), runs, nn.Linear(8, 8).double()]
    blocks[0].requires_grad_(False)
    chain, model = chain_of(blocks, recompute=True)
    ((inputs, targets),) = regression(1, 4)
    chain.forward(inputs, targets, _no_seed).backward()
    assert runs.count == 1
    blocks[0].requires_grad_(True)
    chain.forward(inputs, targets, _no_seed).backward()
    assert runs.count == 3
    chain.evaluate(inputs, targets)
    assert runs.count == 4
    assert all(p.grad is not None for p in model.parameters())


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * 2


# --- memory --------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A block with much inside: it tells what of its insides is alive."""

    def __init__(self, alive: weakref.WeakSet[Tensor], seen: list[int]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.norm = nn.LayerNorm(8)
        self._alive, self._seen = alive, seen

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(self.norm(x))
        self._alive.add(inside)
        changed: Tensor = self.down(torch.sigmoid(inside))
        self._seen.append(len(self._alive))
        return x + changed


def stage_of(blocks: list[nn.Module], *, recompute: bool, split: bool = False) -> Stage:
    return Stage(
        1,
        blocks,
        0,
        StageSettings(
            loss_fn=F.mse_loss,
            loss_scale=1.0,
            num_stages=2,
            seed_block=lambda microbatch, block: None,
            segments=singles(blocks) if recompute else (),
            deferral=defer_weight_gradients(blocks) if split else None,
        ),
    )


def saved_bytes(stage: Stage, batch: Batch, parameters: set[int]) -> int:
    """Return the bytes that a forward leaves to backward, each storage once, weights not."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    stage.expect(0, batch[1])
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.forward(0, batch[0])
    return sum(sizes.values())


@pytest.mark.parametrize("split", [False, True])
def test_a_forward_keeps_the_inputs_of_blocks_and_nothing_else(split: bool) -> None:
    found = {}
    for recompute in (False, True):
        blocks = made(lambda: [Wide(weakref.WeakSet(), []) for _ in range(4)])
        weights = {p.data_ptr() for block in blocks for p in block.parameters()}
        stage = stage_of(blocks, recompute=recompute, split=split)
        ((inputs, targets),) = regression(1, 16)
        found[recompute] = saved_bytes(stage, (inputs, targets), weights)
    assert found[True] == 4 * inputs.nbytes
    assert found[False] > 8 * found[True]


@pytest.mark.parametrize("split", [False, True])
def test_backward_holds_the_inside_of_one_block_at_a_time(split: bool) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    seen: list[int] = []
    blocks = made(lambda: [Wide(alive, seen) for _ in range(4)])
    stage = stage_of(blocks, recompute=True, split=split)
    for microbatch, (inputs, targets) in enumerate(regression(2, 16)):
        stage.expect(microbatch, targets)
        stage.forward(microbatch, inputs)
    assert seen == [1] * 8 and not alive
    for microbatch in range(2):
        stage.backward(microbatch, None)
        if split:
            stage.weight(microbatch)
    assert len(seen) == 16 and set(seen) == {1} and not alive
    assert stage.num_in_flight == 0


def test_halves_of_a_split_backward_are_equal() -> None:
    """Several microbatches in flight, their weight halves put off; ids at the beginning."""

    def build() -> list[nn.Module]:
        return [nn.Embedding(11, 8), nn.LayerNorm(8), Wide(weakref.WeakSet(), []), nn.Linear(8, 8)]

    found = []
    for recompute in (False, True):
        blocks = made(build)
        deferral = defer_weight_gradients(blocks)
        segments = singles(blocks) if recompute else ()
        chain = Chain(blocks, loss_fn=F.mse_loss, segments=segments, deferral=deferral)
        ids, (targets, _) = torch.arange(8) % 5, regression(1, 8)[0]
        halves = [WeightStore() for _ in range(3)]
        losses = [chain.forward(ids + n, targets, _no_seed, halves[n]) for n in range(3)]
        for loss in losses:
            loss.backward()
        assert blocks[0].weight.grad is None, "W comes later"
        assert [half.num_deferred for half in halves] == [4, 4, 4]
        for half in halves:
            half.run()
        found.append(tensors_of(nn.Sequential(*blocks)))
    assert_same_by_name(found[1], found[0], exactly=True)


# --- what cannot be repeated ---------------------------------------------------------------------


class Foreign(nn.Module):
    """Uses a parameter that is hidden from the module."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.hidden = [owner]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.hidden[0].weight)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Late(nn.Module):
    """Changes a buffer in its second forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 2:
            self.kept += 1
        return x


def _foreign() -> list[nn.Module]:
    first = nn.Linear(8, 8)
    return [first, Foreign(first)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: [nn.Linear(8, 8), nn.ReLU(inplace=True)], "block 1 changes its input in place"),
        (_foreign, r"block 1 uses a parameter of shape \(8, 8\) that is not its own"),
        (lambda: [nn.Linear(8, 8), Pair(), nn.Linear(8, 8)], "block 1 returns a tuple"),
        (lambda: [nn.Linear(8, 8), Late()], "buffer 'kept' of a Late did not change in the first"),
    ],
    ids=["in place", "foreign parameter", "pair", "late buffer"],
)
def test_blocks_that_cannot_be_repeated_are_refused(
    build: Callable[[], list[nn.Module]], message: str
) -> None:
    plan = Plan(microbatch_size=2, num_microbatches=2, recompute="full")
    with pytest.raises(ConfigError, match=message) as error:
        train_blocks(build, plan)
    assert "memory.recompute" in str(error.value)


def test_on_a_pipeline_the_refusal_reaches_every_rank() -> None:
    plan = Plan(pipe=2, num_microbatches=2, recompute="full", stage_boundaries=(2,))
    errors = {}

    def body(world: World) -> None:
        blocks = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)]
        run = parallelize(blocks, F.mse_loss, OPTIMIZERS["sgd"], plan, world=world)
        try:
            list(run.steps([(torch.zeros(2, 8), torch.zeros(2, 8))]))
        except GanglionError as error:
            errors[world.rank] = str(error)

    run_threads(Mesh(pipe=2), body, timeout_s=20.0)
    assert all("block 3 changes its input in place" in text for text in errors.values())
    assert set(errors) == {0, 1}
