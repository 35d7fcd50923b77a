"""Block costs: what a measurement finds, on a clock of its own, and that it leaves no trace."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.costs import balanced_boundaries
from ganglion.execute.comm import World, run_threads
from ganglion.execute.measure import block_costs
from ganglion.execute.measure.block_costs import agreed_costs, guessed_costs, measured_costs


class Clock:
    """A clock that moves only when a block says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Taking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now_s += seconds
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now_s += 2 * ctx.seconds
        return gradient, None, None


class Slow(nn.Module):
    """Takes `seconds` forward and twice that backward."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._clock, self._seconds = clock, seconds

    def forward(self, hidden: Tensor) -> Tensor:
        return _Taking.apply(hidden * self.weight, self._clock, self._seconds)


class Pair(nn.Module):
    """Returns what is no tensor."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self._clock.now_s += 1.0
        return hidden, hidden


class Sum(nn.Module):
    """Takes the pair."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(block_costs, "_now_s", clock)
    return clock


SAMPLE = (torch.ones(2, 3), torch.zeros(2, 3))


def test_each_block_costs_its_forward_and_backward(clock: Clock) -> None:
    blocks = {"first": Slow(clock, 1.0), "second": Slow(clock, 0.25)}
    assert measured_costs(blocks, nn.functional.mse_loss, SAMPLE, nullcontext) == [3.0, 0.75]


def test_the_last_block_pays_for_the_loss(clock: Clock) -> None:
    slow_loss = Slow(clock, 2.0)
    costs = measured_costs(
        {"a": Slow(clock, 1.0), "b": Slow(clock, 1.0)},
        lambda output, target: slow_loss(nn.functional.mse_loss(output, target)),
        SAMPLE,
        nullcontext,
    )
    assert costs == [3.0, 9.0]


def test_the_least_of_the_repeats_counts(clock: Clock) -> None:
    taken = iter([0.5, 5.0, 1.0, 7.0, 3.0])  # the first only warms up

    class Varying(Slow):
        def forward(self, hidden: Tensor) -> Tensor:
            self._seconds = next(taken)
            return super().forward(hidden)

    blocks = {"a": Varying(clock, 0.0)}
    assert measured_costs(blocks, nn.functional.mse_loss, SAMPLE, nullcontext) == [3.0]


def test_what_is_no_tensor_passes_from_block_to_block(clock: Clock) -> None:
    blocks = {"pair": Pair(clock), "sum": Sum(), "slow": Slow(clock, 1.0)}
    costs = measured_costs(blocks, nn.functional.mse_loss, SAMPLE, nullcontext)
    assert costs == [3.0, 0.0, 3.0]


def test_a_measurement_leaves_no_trace() -> None:
    torch.manual_seed(1)
    blocks = {
        "embed": nn.Embedding(7, 4),
        "norm": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(0.5)),
        "head": nn.Linear(12, 7),
    }
    held = blocks["head"].weight.grad = torch.full((7, 12), 3.0)
    before = {
        f"{name}.{key}": tensor.clone()
        for name, block in blocks.items()
        for key, tensor in block.state_dict().items()
    }
    random_state = torch.get_rng_state()
    sample = (torch.randint(0, 7, (5, 3)), torch.randint(0, 7, (5,)))
    torch.set_rng_state(random_state)
    costs = measured_costs(blocks, nn.functional.cross_entropy, sample, nullcontext)
    assert len(costs) == 3 and all(cost > 0 for cost in costs)
    for name, block in blocks.items():
        for key, tensor in block.state_dict().items():
            torch.testing.assert_close(tensor, before[f"{name}.{key}"], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert blocks["head"].weight.grad is held and torch.equal(held, torch.full((7, 12), 3.0))
    assert blocks["embed"].weight.grad is None


def test_a_guess_counts_weights_but_not_tables() -> None:
    blocks = {"embed": nn.Embedding(1000, 8), "linear": nn.Linear(8, 4)}
    assert guessed_costs(blocks) == [1.0, 1.0 + 8 * 4 + 4]


def _cut(world: World) -> tuple[int, ...]:
    """Cut four blocks in two stages, of which the two ranks measure different costs."""
    costs = [(1.0, 9.0, 1.0, 1.0), (9.0, 1.0, 1.0, 2.5)][world.rank]
    return balanced_boundaries(agreed_costs(world, costs), 2)


def test_all_ranks_cut_where_the_least_costs_of_all_are_even() -> None:
    assert run_threads(Plan(pipe=2).mesh(), _cut) == [(2,), (2,)]


def _measured_run(world: World, plan: Plan) -> tuple[int, ...]:
    """Let the first block cost as much as the three others."""
    clock = Clock()
    block_costs_clock[threading.get_ident()] = clock
    blocks = [Slow(clock, 3.0), Slow(clock, 1.0), Slow(clock, 1.0), Slow(clock, 1.0)]
    run = parallelize(
        blocks,
        nn.functional.mse_loss,
        torch.optim.SGD,
        plan,
        RunSettings(sample=SAMPLE),
        world=world,
    )
    return run.plan.stage_boundaries


block_costs_clock: dict[int, Clock] = {}


@pytest.mark.parametrize("axes", [{}, {"x": 2}, {"z": 2}], ids=str)
def test_a_run_with_a_sample_is_cut_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, int]
) -> None:
    monkeypatch.setattr(
        block_costs, "_now_s", lambda: block_costs_clock[threading.get_ident()].now_s
    )
    plan = Plan(pipe=2, num_microbatches=2, **axes)
    found = run_threads(plan.mesh(), lambda world: _measured_run(world, plan))
    assert found == [(1,)] * plan.num_ranks


def test_blocks_without_memory_are_lent_some() -> None:
    """Also a weight that two blocks share; afterwards nothing has memory, nor a gradient."""
    with torch.device("meta"):
        blocks = {
            "embed": nn.Embedding(7, 4),
            "norm": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 4)),
            "head": nn.Linear(4, 7, bias=False),
        }
        blocks["head"].weight = blocks["embed"].weight
    tensors = [t for b in blocks.values() for t in (*b.parameters(), *b.buffers())]
    sample = (torch.randint(0, 7, (5, 3)), torch.randint(0, 7, (5,)))
    costs = measured_costs(blocks, nn.functional.cross_entropy, sample, nullcontext)
    assert len(costs) == 3 and all(cost > 0 for cost in costs)
    found = [t for b in blocks.values() for t in (*b.parameters(), *b.buffers())]
    assert all(a is b for a, b in zip(tensors, found, strict=True))
    assert all(tensor.is_meta and tensor.grad is None for tensor in found)
    assert blocks["head"].weight is blocks["embed"].weight


def test_memory_is_taken_back_after_an_error() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.weight.is_meta
            raise ValueError("of the block")

    block = Failing(3, 3, device="meta")
    with pytest.raises(ValueError, match="of the block"):
        measured_costs({"a": block}, nn.functional.mse_loss, SAMPLE, nullcontext)
    assert block.weight.is_meta
