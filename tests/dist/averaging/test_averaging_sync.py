"""Synchronous averaging on real processes: equal to the simulation, to its twin and to itself."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.outer import diloco
from ganglion.execute.comm import World, torch_world
from tests.support.averages import (
    Trained,
    assert_near,
    assert_same_bits,
    copies,
    make_model,
    momentum_sgd,
    serial_easgd,
    train_steps,
    train_threads,
    train_worker,
)
from tests.support.command import python, under_torchrun
from tests.support.harness import Ranks

OUTER = {"diloco": diloco()}


def train(world: World, num_steps: int, wishes: dict[str, Any], dtype: str) -> Trained:
    given = {**wishes, "outer": OUTER[wishes["outer"]]} if "outer" in wishes else wishes
    return train_worker(world, num_steps, dtype=getattr(torch, dtype), **given)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("center", ["replicated", "delta", "root"])
def test_processes_are_the_serial_simulation(ranks: Ranks, num_ranks: int, center: str) -> None:
    workers, wanted = serial_easgd(num_ranks, 7, alpha=0.9 / num_ranks, tau=2)
    found = ranks.run(num_ranks, train, 7, {"beta": 0.9, "tau": 2, "center": center}, "float64")
    for worker, trained in zip(workers, found, strict=True):
        assert_near(trained.weights, worker)
    assert_near(found[0].center, wanted)


@pytest.mark.parametrize(
    "wishes",
    [
        {"beta": 0.9, "tau": 1},
        {"beta": 0.9, "tau": 1, "center": "root"},
        {"beta": 0.9, "tau": 1, "deterministic": True},
        {"beta": 0.9, "tau": 1, "deterministic": True, "center": "root"},
        {"beta": 0.9, "tau": 2, "compress": "int8"},
        {"beta": 0.9, "tau": 1, "pack": False},
        {"outer": "diloco", "tau": 3, "delay": 2, "fragments": 2, "q": 0.6},
    ],
    ids=str,
)
def test_overlap_and_repetition_keep_every_bit(ranks: Ranks, wishes: dict[str, Any]) -> None:
    runs = [
        ranks.run(3, train, 8, {**wishes, "overlap": overlap}, "float32")
        for overlap in (True, True, False)
    ]
    for first, again, waiting in zip(*runs, strict=True):
        for other in (again, waiting):
            assert_same_bits(other.weights, first.weights)
            assert_same_bits(other.center, first.center)


def digests(world: World, wishes: dict[str, Any]) -> int:
    model = make_model(torch.float32, seed=world.rank)
    optimizer = momentum_sgd(model.parameters())
    average = ElasticAverage(model, optimizer, world=world, **wishes)
    with average:
        train_steps(model, optimizer, world.rank, range(6))
    digest = average.check_center()
    average.close()
    return digest


def test_every_process_has_the_same_centre(ranks: Ranks) -> None:
    for wishes in ({"beta": 0.9, "tau": 1}, {"beta": 0.9, "tau": 2, "compress": "bf16"}):
        assert len(set(ranks.run(3, digests, wishes))) == 1


def saved_and_resumed(world: World, wishes: dict[str, Any]) -> Any:
    def start(seed: int) -> tuple[Any, Any, ElasticAverage]:
        model = make_model(torch.float32, seed=seed)
        optimizer = momentum_sgd(model.parameters())
        return model, optimizer, ElasticAverage(model, optimizer, world=world, **wishes)

    model, optimizer, average = start(0)
    with average:
        train_steps(model, optimizer, world.rank, range(5))
        state = average.state_dict()
        train_steps(model, optimizer, world.rank, range(5, 9))
    wanted = copies(model)
    model, optimizer, average = start(3)
    average.load_state_dict(state)
    with average:
        train_steps(model, optimizer, world.rank, range(5, 9))
    return wanted, copies(model)


def test_a_resumed_process_has_every_bit(ranks: Ranks) -> None:
    for wanted, found in ranks.run(2, saved_and_resumed, {"beta": 0.9, "tau": 3}):
        assert_same_bits(found, wanted)


def two_levels(world: World) -> Trained:
    hosts = torch_world(world.rank, Mesh(data=2, x=2), timeout_s=60.0)
    trained = train_worker(hosts, 7, inner=2, beta=0.8, tau=2)
    hosts.close()
    return trained


def test_two_levels_of_processes(ranks: Ranks) -> None:
    found = ranks.run(4, two_levels)
    for leader, other in ((found[0], found[1]), (found[2], found[3])):
        assert_same_bits(other.weights, leader.weights)
        assert_same_bits(other.center, leader.center)
    assert_same_bits(found[0].center, found[2].center)
    assert not torch.equal(found[0].weights["0.weight"], found[2].weights["0.weight"])


def test_summed_gradients_keep_processes_equal(ranks: Ranks) -> None:
    first, second = ranks.run(2, train, 6, {"mode": "sync_sgd", "reduction": "mean"}, "float32")
    assert_same_bits(first.weights, second.weights)
    threads = train_threads(2, 6, mode="sync_sgd", reduction="mean", dtype=torch.float32)
    assert_near(first.weights, threads[0].weights, 1e-6)


EXAMPLE = str(Path(__file__).parents[3] / "examples" / "elastic_averaging.py")


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [(1, []), (2, []), (2, ["mode=async"]), (4, ["mode=async", "servers=2"])],
    ids=["alone", "two", "async", "servers"],
)
def test_the_example_runs_alone_and_with_two_workers(
    num_ranks: int, words: list[str], tmp_path: Path
) -> None:
    run = python if num_ranks == 1 else functools.partial(under_torchrun, num_ranks)
    result = run(EXAMPLE, *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    num_workers = min(num_ranks, 2)
    assert f"workers {num_workers}  exchanges 150" in result.stdout
    accuracy = float(result.stdout.split("accuracy of the centre ")[1])
    assert accuracy > 0.8
