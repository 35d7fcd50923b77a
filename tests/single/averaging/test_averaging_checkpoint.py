"""A full checkpoint resumes bit by bit; one of the centre fits any number of workers."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.errors import CheckpointError, ConfigError
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.outer import diloco
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    LR,
    Trained,
    assert_same_bits,
    copies,
    make_model,
    momentum_sgd,
    train_steps,
    train_threads,
)

CASES: dict[str, dict[str, Any]] = {
    "replicated": {"beta": 0.9, "tau": 3},
    "rho": {"rho": 4.0, "tau": 2},
    "delta": {"beta": 0.9, "tau": 3, "center": "delta"},
    "root": {"beta": 0.9, "tau": 3, "center": "root"},
    "int8": {"beta": 0.9, "tau": 1, "compress": "int8"},
    "diloco": {"outer": diloco(), "tau": 4},
    "in flight": {"outer": diloco(), "tau": 4, "delay": 3, "fragments": 2},
    "in flight int8": {"outer": diloco(), "tau": 4, "delay": 3, "compress": "int8"},
    "sync_sgd": {"mode": "sync_sgd"},
}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@functools.cache
def unbroken(name: str) -> list[Trained]:
    return train_threads(3, 13, optimizer_of=momentum_sgd, dtype=torch.float32, **CASES[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("saved_after", [4, 5, 6])
def test_a_resumed_run_has_every_bit_of_an_unbroken_one(name: str, saved_after: int) -> None:
    wishes = CASES[name]
    wanted = unbroken(name)

    def save(world: World) -> Any:
        model = make_model(torch.float32)
        optimizer = momentum_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, world=world, **wishes)
        average.__enter__()
        train_steps(model, optimizer, world.rank, range(saved_after))
        state = average.state_dict()
        frozen = copy.deepcopy(state)
        train_steps(model, optimizer, world.rank, range(saved_after, saved_after + 2))
        assert torch.equal(state["weights"], frozen["weights"])  # it is no view of the model
        return through_a_file(state)

    states = run_threads(Mesh(data=3), save)

    def resume(world: World) -> Any:
        model = make_model(torch.float32, seed=99)
        optimizer = momentum_sgd(model.parameters())
        optimizer.param_groups[0]["lr"] = 77.0  # the checkpoint knows better
        given = {k: v for k, v in wishes.items() if k != "rho"}
        if "rho" in wishes:
            optimizer.param_groups[0]["lr"] = LR
            given["rho"] = wishes["rho"]
        average = ElasticAverage(model, optimizer, world=world, **given)
        average.load_state_dict(states[world.rank])
        states[world.rank]["weights"].zero_()  # nor is the model a view of it
        with average:
            train_steps(model, optimizer, world.rank, range(saved_after, 13))
        weights = copies(model)
        with average.center_weights():
            return weights, copies(model)

    for trained, (weights, center) in zip(wanted, run_threads(Mesh(data=3), resume), strict=True):
        assert_same_bits(weights, trained.weights)
        assert_same_bits(center, trained.center)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_centre_alone_starts_any_number_of_workers(name: str, num_workers: int) -> None:
    wishes = CASES[name]

    def save(world: World) -> Any:
        model = make_model(torch.float32)
        optimizer = momentum_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, world=world, **wishes)
        with average:
            train_steps(model, optimizer, world.rank, range(6))
        return through_a_file(average.state_dict("center_only"))

    state = run_threads(Mesh(data=3), save)[0]
    assert set(state["center"]) == set(copies(make_model()))

    def resume(world: World) -> Any:
        model = make_model(torch.float32, seed=99)
        optimizer = momentum_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, world=world, **wishes)
        average.load_state_dict(state)
        weights = copies(model)
        with average:
            losses = train_steps(model, optimizer, world.rank, range(6, 10))
        return weights, losses

    for weights, losses in run_threads(Mesh(data=num_workers), resume):
        assert_same_bits(weights, state["center"])
        assert all(loss < 10 for loss in losses)


def one(**wishes: Any) -> ElasticAverage:
    model = make_model()
    return ElasticAverage(model, torch.optim.SGD(model.parameters(), lr=LR), **wishes)


def test_another_number_of_workers_needs_the_centre_alone() -> None:
    average = one(beta=0.9)
    state = average.state_dict()
    state["num_workers"] = 8
    with pytest.raises(CheckpointError, match=r"worker 0 of 8, .*worker 0 of 1.*center_only"):
        average.load_state_dict(state)


def test_another_model_is_named() -> None:
    average = one(beta=0.9)
    state = average.state_dict("center_only")
    state["center"]["2.bias"] = torch.zeros(9)
    with pytest.raises(CheckpointError, match=r"2\.bias has 3 elements in the model and 9 in"):
        average.load_state_dict(state)
    del state["center"]["2.bias"]
    with pytest.raises(CheckpointError, match=r"2\.bias has 3 elements in the model and 0 in"):
        average.load_state_dict(state)


def test_what_is_no_checkpoint() -> None:
    average = one(beta=0.9)
    for state in ({}, {"kind": "other"}, make_model().state_dict()):
        with pytest.raises(CheckpointError, match="no state of an ElasticAverage"):
            average.load_state_dict(state)
    with pytest.raises(CheckpointError, match="format 7"):
        average.load_state_dict({**average.state_dict(), "format": 7})
    with pytest.raises(ConfigError, match='kind = "half"'):
        average.state_dict("half")
