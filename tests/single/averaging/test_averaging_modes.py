"""Every mode that a user can name runs behind the same surface, and its workers learn."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.outer import diloco, local_sgd, slow_momentum
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    LR,
    Weights,
    assert_near,
    assert_same_bits,
    copies,
    gradient,
    loss_of,
    make_model,
    momentum_sgd,
    plain_sgd,
    train_steps,
    train_threads,
)

MODES: dict[str, dict[str, Any]] = {
    "sync easgd 1": {"beta": 0.9, "tau": 1, "center": "host_root", "overlap": False},
    "sync easgd 2": {"beta": 0.9, "tau": 1, "center": "root", "overlap": False},
    "sync easgd 3": {"beta": 0.9, "tau": 1, "center": "root"},
    "sync sgd": {"mode": "sync_sgd"},
    "original easgd": {"mode": "round_robin", "beta": 0.9, "tau": 1},
    "original easgd, no overlap": {"mode": "round_robin", "beta": 0.9, "tau": 1, "overlap": False},
    "async easgd": {"mode": "async", "beta": 0.9, "tau": 2},
    "async easgd, sharded": {"mode": "async", "beta": 0.9, "tau": 2, "center": "sharded:2"},
    "async sgd": {"mode": "async_sgd", "tau": 1},
    "async msgd": {"mode": "async_sgd", "tau": 1, "center_momentum": 0.5},
    "hogwild easgd": {"mode": "hogwild", "beta": 0.9, "tau": 1},
    "hogwild sgd": {"mode": "hogwild_sgd", "tau": 1},
    "local sgd": {"outer": local_sgd(), "tau": 4},
    "slowmo": {"outer": slow_momentum(), "tau": 4},
    "diloco": {"outer": diloco(), "tau": 4},
    "streaming": {"outer": diloco(), "tau": 4, "delay": 1, "fragments": 2, "q": 0.5},
}


def loss_at(weights: Weights) -> float:
    model = make_model()
    model.load_state_dict(weights)
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(200, 5, generator=draw, dtype=torch.float64)
    return float(loss_of(model(x), x[:, :3]).detach())


@pytest.mark.parametrize("name", MODES)
def test_the_centre_learns(name: str) -> None:
    start = loss_at(copies(make_model()))
    found = train_threads(3, 60, **MODES[name])
    for trained in found:
        assert loss_at(trained.center) < 0.6 * start
        assert trained.metrics.num_steps == 60
        assert trained.metrics.num_exchanges > 0


def test_round_robin_is_its_equations() -> None:
    """In order of rank: w' = w - lr g - alpha (w - c), c' = c + alpha (w - c)."""
    alpha, num_workers = 0.3, 3
    model = make_model()
    center, workers = copies(model), [copies(model) for _ in range(num_workers)]
    for step in range(5):
        for rank, worker in enumerate(workers):
            slope = gradient(model, worker, rank, step)
            force = {n: alpha * (w - center[n]) for n, w in worker.items()}
            center = {n: c + force[n] for n, c in center.items()}
            workers[rank] = {n: w - LR * slope[n] - force[n] for n, w in worker.items()}
    for overlap in (True, False):
        found = train_threads(
            num_workers, 5, mode="round_robin", alpha=alpha, tau=1, overlap=overlap
        )
        for worker, trained in zip(workers, found, strict=True):
            assert_near(trained.weights, worker)


@pytest.mark.parametrize("mode", ["async", "hogwild", "async_sgd", "hogwild_sgd"])
def test_one_asynchronous_worker_at_rate_zero_is_plain_training(mode: str) -> None:
    rate = {} if mode.endswith("sgd") else {"alpha": 0.0}
    (trained,) = train_threads(1, 6, mode=mode, tau=2, optimizer_of=momentum_sgd, **rate)
    model = make_model()
    train_steps(model, momentum_sgd(model.parameters()), 0, range(6))
    assert_near(trained.weights, copies(model))


@pytest.mark.parametrize("mode", ["async", "hogwild", "async_sgd", "hogwild_sgd"])
@pytest.mark.parametrize("kind", ["full", "center_only"])
def test_a_checkpoint_brings_a_served_centre_back(mode: str, kind: str) -> None:
    rate = {} if mode.endswith("sgd") else {"beta": 0.8}
    wanted: list[Weights] = []
    together = threading.Barrier(2)

    def save(world: World) -> Any:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, mode=mode, tau=1, world=world, **rate)
        with average:
            train_steps(model, optimizer, world.rank, range(5))
        together.wait(10)
        state = average.state_dict(kind)
        with average.center_weights():
            if world.rank == 0:
                wanted.append(copies(model))
        together.wait(10)
        average.close()
        return state

    states = run_threads(Mesh(data=2), save)

    def resume(world: World) -> Weights:
        model = make_model(seed=4)
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, mode=mode, tau=1, world=world, **rate)
        average.load_state_dict(states[world.rank])
        together.wait(10)
        with average.center_weights():
            center = copies(model)
        together.wait(10)
        with average:
            losses = train_steps(model, optimizer, world.rank, range(5, 8))
        average.close()
        assert all(loss < 5 for loss in losses)
        return center

    for center in run_threads(Mesh(data=2), resume):
        assert_same_bits(center, wanted[0])


def test_workers_of_several_processes_are_synchronous() -> None:
    with pytest.raises(ConfigError, match='mode = "async" has workers of one process'):
        train_threads(2, 1, mode="async", beta=0.9, inner=2)
