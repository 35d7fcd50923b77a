"""Two levels: a host is one worker with a bigger batch, and hosts average elastically."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.errors import LayoutError
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.outer import diloco
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    LR,
    Weights,
    assert_near,
    assert_same_bits,
    copies,
    gradient,
    make_model,
    plain_sgd,
    train_steps,
    train_threads,
)


def serial_two_level(
    num_hosts: int, inner: int, num_steps: int, alpha: float, tau: int, reduction: str
) -> tuple[list[Weights], Weights]:
    model = make_model()
    center, hosts = copies(model), [copies(model) for _ in range(num_hosts)]
    scale = 1 / inner if reduction == "mean" else 1.0
    for step in range(num_steps):
        forces = [{n: alpha * (w - center[n]) for n, w in host.items()} for host in hosts]
        for number, host in enumerate(hosts):
            slopes = [gradient(model, host, number * inner + i, step) for i in range(inner)]
            for name in host:
                force = forces[number][name] if step % tau == 0 else 0.0
                slope = scale * sum(s[name] for s in slopes)
                host[name] = host[name] - LR * slope - force
        if step % tau == 0:
            center = {n: c + sum(f[n] for f in forces) for n, c in center.items()}
    return hosts, center


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("num_hosts", "inner", "tau"), [(2, 2, 1), (2, 2, 3), (3, 2, 2), (1, 3, 1)]
)
def test_both_levels_are_the_serial_simulation(
    num_hosts: int, inner: int, tau: int, reduction: str
) -> None:
    alpha = 0.8 / num_hosts
    hosts, center = serial_two_level(num_hosts, inner, 7, alpha, tau, reduction)
    found = train_threads(num_hosts * inner, 7, inner=inner, beta=0.8, tau=tau, reduction=reduction)
    for rank, trained in enumerate(found):
        assert_near(trained.weights, hosts[rank // inner])
        assert_near(trained.center, center)
        assert_same_bits(trained.weights, found[rank - rank % inner].weights)


@pytest.mark.parametrize("wishes", [{"beta": 0.8, "tau": 2}, {"outer": diloco(), "tau": 3}])
def test_overlap_keeps_every_bit(wishes: dict[str, Any]) -> None:
    runs = [
        train_threads(4, 8, inner=2, overlap=overlap, dtype=torch.float32, **wishes)
        for overlap in (False, True)
    ]
    for waiting, overlapped in zip(*runs, strict=True):
        assert_same_bits(overlapped.weights, waiting.weights)
        assert_same_bits(overlapped.center, waiting.center)


@pytest.mark.parametrize("wishes", [
    {"beta": 0.8, "tau": 2}, {"outer": diloco(), "tau": 3},
    {"outer": diloco(), "tau": 4, "delay": 2, "fragments": 2},
])  # fmt: skip
def test_the_processes_of_a_host_are_equal_after_every_step(wishes: dict[str, Any]) -> None:
    def body(world: World) -> list[Weights]:
        model = make_model(seed=world.rank)
        optimizer = plain_sgd(model.parameters())
        seen = []
        with ElasticAverage(model, optimizer, world=world, inner=2, **wishes):
            for step in range(9):
                train_steps(model, optimizer, world.rank, range(step, step + 1))
                seen.append(copies(model))
        return seen

    found = run_threads(Mesh(data=2, x=2), body)
    for leader, other in ((found[0], found[1]), (found[2], found[3])):
        for step in range(9):
            assert_same_bits(other[step], leader[step])


def test_a_resumed_host_has_every_bit() -> None:
    wishes: dict[str, Any] = {"inner": 2, "beta": 0.8, "tau": 3}
    wanted = train_threads(4, 9, **wishes)

    def start(world: World, seed: int) -> tuple[Any, Any, ElasticAverage]:
        model = make_model(seed=seed)
        optimizer = plain_sgd(model.parameters())
        return model, optimizer, ElasticAverage(model, optimizer, world=world, **wishes)

    def body(world: World) -> tuple[Weights, Weights]:
        model, optimizer, average = start(world, 0)
        with average:
            train_steps(model, optimizer, world.rank, range(5))
        state = average.state_dict()
        model, optimizer, average = start(world, 7)
        average.load_state_dict(state)
        with average:
            train_steps(model, optimizer, world.rank, range(5, 9))
        weights = copies(model)
        with average.center_weights():
            return weights, copies(model)

    found = run_threads(Mesh(data=2, x=2), body)
    for (weights, center), trained in zip(found, wanted, strict=True):
        assert_same_bits(weights, trained.weights)
        assert_same_bits(center, trained.center)


def test_inner_must_divide_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(LayoutError, match="inner = 2 does not divide the 1 processes"):
        ElasticAverage(model, optimizer, beta=0.9, inner=2)
