"""What metrics() tells of an exchange is what happened: the move of the centre, the step, ages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.metrics import ExchangeMetrics, Motion, distance
from ganglion.execute.averaging.methods.outer import diloco
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.comm import World, run_threads
from tests.support.averages import LR, batch, copies, loss_of, make_model, plain_sgd

LARGE = 70_000  # more than a block of the difference, and not a multiple of it


def center_of(average: ElasticAverage, model: nn.Module) -> Tensor:
    with average.center_weights():
        return torch.cat([w.flatten() for w in copies(model).values()])


def backward(model: nn.Module, rank: int, step: int) -> float:
    """Return the norm of the gradients."""
    x, y = batch(rank, step)
    loss_of(model(x), y).backward()
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


METHODS: dict[str, dict[str, Any]] = {
    "replicated": {"beta": 0.9},
    "delta": {"beta": 0.9, "center": "delta"},
    "int8": {"beta": 0.9, "compress": "int8"},
    "root": {"beta": 0.9, "center": "root"},
    "diloco": {"outer": diloco()},
    "partial pull": {"outer": diloco(), "q": 0.5},
    "async": {"mode": "async", "beta": 0.9},
    "sharded": {"mode": "async", "beta": 0.9, "center": "sharded:2"},
    "async_sgd": {"mode": "async_sgd"},
    "async_msgd": {"mode": "async_sgd", "center_momentum": 0.9},
    "msgd sharded": {"mode": "async_sgd", "center_momentum": 0.9, "center": "sharded:2"},
    "hogwild": {"mode": "hogwild", "beta": 0.9},
    "hogwild_sgd": {"mode": "hogwild_sgd"},
}


@pytest.mark.parametrize("name", METHODS)
def test_the_move_of_the_centre_is_that_of_the_last_exchange(name: str) -> None:
    """Workers take turns, so that nobody else moves a centre that is not theirs alone."""

    def body(world: World) -> list[tuple[float, float, float]]:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, tau=99, world=world, **METHODS[name])
        is_sync = average._options.mode == "sync"
        found = []
        for step in range(3):
            backward(model, world.rank, step)
            optimizer.step()
            optimizer.zero_grad()
            for turn in range(1 if is_sync else 2):
                if is_sync or world.rank == turn:
                    old = center_of(average, model)
                    average.sync_now()
                    new = center_of(average, model)
                    seen = average.metrics()
                    found.append((float((new - old).norm()), seen.center_move, seen.center_speed))
                    assert seen.center_speed * float(new.norm()) == pytest.approx(
                        seen.center_move, rel=0.2
                    )
                world.barrier()
        average.close()
        return found

    for rank, found in enumerate(run_threads(Mesh(data=2), body)):
        if name == "root" and rank == 1:  # which knows the centre one exchange late
            found = found[1:]
        for moved, told, _ in found:
            assert told == pytest.approx(moved, rel=1e-5)
            assert moved > 0 or name == "root"


@pytest.mark.parametrize(
    "wishes",
    [
        {"beta": 0.9},
        {"beta": 0.9, "overlap": False, "center": "root"},
        {"mode": "async", "beta": 0.9},
        {"mode": "round_robin", "beta": 0.9, "overlap": False},
        {"mode": "hogwild", "beta": 0.9},
    ],
)
def test_the_step_is_told_beside_the_force(wishes: dict[str, Any]) -> None:
    def body(world: World) -> None:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, tau=2, world=world, **wishes)
        with average:
            for step in range(4):
                gradient = backward(model, world.rank, step)
                optimizer.step()
                optimizer.zero_grad()
                told = average.metrics().step_norm
                if step % 2 == 0:  # others have no exchange, and leave the number as it was
                    wanted = LR * gradient
                assert told == pytest.approx(wanted, rel=1e-9)
        assert average.metrics().force > 0
        average.close()

    run_threads(Mesh(data=2), body)


def test_the_step_of_many_weights_is_estimated_from_some() -> None:
    model = nn.Linear(500, 140)
    packed, motion = Packed(model), Motion()
    motion.begin_step(packed)
    step = torch.randn(packed.numel, generator=torch.Generator().manual_seed(0))
    packed.flat.add_(step)
    motion.end_step(packed)
    told = motion.seen(ExchangeMetrics(), 1.0).step_norm
    assert told == pytest.approx(float(step.norm()), rel=0.05)
    assert len(packed.sample()) <= 4096


def test_half_precision_weights_are_sampled_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    packed, motion = Packed(model), Motion()
    motion.begin_step(packed)
    with torch.no_grad():
        model[1].bias.add_(1.0)
    motion.end_step(packed)
    assert motion.seen(ExchangeMetrics(), 1.0).step_norm == pytest.approx(2.0, rel=0.02)


def test_the_difference_of_long_vectors_is_taken_whole() -> None:
    draw = torch.Generator().manual_seed(1)
    one, other = (torch.randn(LARGE, generator=draw, dtype=torch.float64) for _ in range(2))
    assert float(distance(one, other)) == pytest.approx(float((one - other).norm()), rel=1e-12)


def test_the_age_is_the_time_between_two_exchanges() -> None:
    times = iter([10.0, 13.0, 20.0])
    motion = Motion(clock=lambda: next(times))
    motion.note(1.0)
    assert motion.seen(ExchangeMetrics(), 4.0).age_s == 3.0
    motion.note(torch.tensor(2.0))
    seen = motion.seen(ExchangeMetrics(), 4.0)
    assert (seen.age_s, seen.center_move, seen.center_speed) == (7.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("counts", "p99", "most"),
    [({}, 0, 0), ({0: 99, 7: 1}, 0, 7), ({0: 98, 3: 1, 7: 1}, 3, 7), ({2: 1}, 2, 2)],
)
def test_stale_exchanges_are_summed_up(counts: dict[int, int], p99: int, most: int) -> None:
    metrics = ExchangeMetrics(staleness=Counter(counts))
    assert (metrics.staleness_p99, metrics.staleness_max) == (p99, most)


@pytest.mark.parametrize(
    ("wishes", "wanted"), [({"beta": 0.9}, 3), ({"mode": "round_robin", "beta": 0.9}, 1)]
)
def test_how_many_exchanges_read_the_same_centre(wishes: dict[str, Any], wanted: int) -> None:
    def body(world: World) -> int:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, tau=1, world=world, **wishes)
        with average:
            for step in range(3):
                backward(model, world.rank, step)
                optimizer.step()
        average.close()
        metrics = average.metrics()
        assert metrics.num_retries == 0
        return metrics.concurrency

    assert run_threads(Mesh(data=3), body) == [wanted] * 3
