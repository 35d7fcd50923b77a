"""Local SGD, SlowMo, DiLoCo and streaming are one form, and that form is its equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    make_model,
    plain_sgd,
    redraw,
    train_steps,
    train_threads,
)


class SerialOuter:
    """SGD with momentum on one tensor, from the equations."""

    def __init__(self, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.speed: Tensor | None = None

    def __call__(self, center: Tensor, slope: Tensor) -> Tensor:
        self.speed = slope if self.speed is None else self.momentum * self.speed + slope
        step = slope + self.momentum * self.speed if self.nesterov else self.speed
        return center - self.lr * step


def serial_outer(
    num_workers: int,
    num_steps: int,
    *,
    tau: int,
    rule: tuple[float, float, bool],
    q: float = 1.0,
    delay: int = 0,
    fragment_of: dict[str, int] | None = None,
    num_fragments: int = 1,
) -> tuple[list[Weights], Weights]:
    model = make_model()
    center = copies(model)
    workers = [copies(model) for _ in range(num_workers)]
    outer = {name: SerialOuter(*rule) for name in center}
    fragment_of = fragment_of or dict.fromkeys(center, 0)
    due: dict[int, list[tuple[str, Tensor]]] = {}
    for step in range(num_steps):
        for rank, worker in enumerate(workers):
            slope = gradient(model, worker, rank, step)
            workers[rank] = {name: w - LR * slope[name] for name, w in worker.items()}
        done = step + 1

        def apply(name: str, mean: Tensor) -> None:
            center[name] = outer[name](center[name], center[name] - mean)
            for worker in workers:
                worker[name] = (1 - q) * worker[name] + q * center[name]

        for name, mean in due.pop(done, []):
            apply(name, mean)
        for name, fragment in fragment_of.items():
            if (done - fragment * tau // num_fragments) % tau == 0:
                mean = sum(worker[name] for worker in workers) / num_workers
                if delay:
                    due.setdefault(done + delay, []).append((name, mean))
                else:
                    apply(name, mean)
    return workers, center


RULES = {
    "local": (local_sgd(), (1.0, 0.0, False)),
    "slow": (slow_momentum(0.8, 0.5), (0.8, 0.5, False)),
    "diloco": (diloco(), (0.7, 0.9, True)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tau", [1, 3])
def test_each_method_is_its_equations(name: str, tau: int) -> None:
    outer, rule = RULES[name]
    workers, center = serial_outer(3, 10, tau=tau, rule=rule)
    found = train_threads(3, 10, tau=tau, outer=outer)
    for worker, trained in zip(workers, found, strict=True):
        assert_near(trained.weights, worker)
        assert_near(trained.center, center)


@pytest.mark.parametrize("q", [0.3, 1.0])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_late_and_partial_pulls(q: float, delay: int) -> None:
    """The last step is outside an exchange, or the flush at the end would apply it early."""
    outer, rule = RULES["diloco"]
    workers, center = serial_outer(3, 15, tau=4, rule=rule, q=q, delay=delay)
    found = train_threads(3, 15, tau=4, outer=outer, q=q, delay=delay)
    for worker, trained in zip(workers, found, strict=True):
        assert_near(trained.weights, worker)
        assert_near(trained.center, center)


@pytest.mark.parametrize("delay", [0, 1])
def test_streaming_by_fragments(delay: int) -> None:
    fragment_of = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}
    outer, rule = RULES["diloco"]
    workers, center = serial_outer(
        2, 11, tau=4, rule=rule, delay=delay, fragment_of=fragment_of, num_fragments=2
    )
    found = train_threads(2, 11, tau=4, outer=outer, delay=delay, fragments=2)
    assert found[0].metrics.num_exchanges == 5
    for worker, trained in zip(workers, found, strict=True):
        assert_near(trained.weights, worker)
        assert_near(trained.center, center)


@pytest.mark.parametrize("fragments", [1, 2, 4])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_overlap_keeps_every_bit(fragments: int, delay: int) -> None:
    runs = [
        train_threads(
            3, 14, tau=4, outer=diloco(), q=0.7, delay=delay, fragments=fragments, overlap=overlap,
            dtype=torch.float32,
        )
        for overlap in (False, True)
    ]  # fmt: skip
    for waiting, overlapped in zip(*runs, strict=True):
        assert_same_bits(overlapped.weights, waiting.weights)
        assert_same_bits(overlapped.center, waiting.center)


def test_any_optimizer_outside_sees_the_shapes_of_the_model() -> None:
    seen: list[torch.Size] = []

    def outer(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        seen.extend(p.shape for p in parameters)
        return torch.optim.AdamW(parameters, lr=0.01)

    found = train_threads(1, 6, tau=2, outer=outer)
    assert seen == [p.shape for p in make_model().parameters()]
    assert found[0].metrics.num_exchanges == 3


def test_elastic_averaging_is_the_outer_form_with_a_small_pull() -> None:
    """Without gradients: q = alpha, SGD(beta) outside, and the old centre pulls."""

    def body(world: World, **wishes: Any) -> tuple[Weights, Weights]:
        model = make_model(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        average = ElasticAverage(model, optimizer, world=world, tau=1, **wishes)
        redraw(model, seed=world.rank + 1)
        average.sync_now()
        weights = copies(model)
        with average.center_weights():
            return weights, copies(model)

    beta = 0.6
    elastic = run_threads(Mesh(data=3), lambda w: body(w, beta=beta))
    form = run_threads(
        Mesh(data=3), lambda w: body(w, outer=lambda ps: torch.optim.SGD(ps, lr=beta), q=1e-9)
    )
    for (_, center), (_, other) in zip(elastic, form, strict=True):
        assert_near(other, center)


def test_running_statistics_are_averaged_without_momentum() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x))

    def body(world: World) -> tuple[Tensor, Tensor, Tensor]:
        model = redraw(Normed(), 0).double()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, world=world, tau=3, outer=diloco())
        with average:
            train_steps(model, optimizer, world.rank, range(2))
            own = model.norm.running_var.clone()
            train_steps(model, optimizer, world.rank, range(2, 3))
        with average.center_weights():
            center = model.norm.running_var.clone()
        return own, model.norm.running_var.clone(), center

    (_, first, center), (_, second, _) = run_threads(Mesh(data=2), body)
    assert torch.equal(first, second) and torch.equal(first, center)
    alone = []
    for rank in range(2):
        model = redraw(Normed(), 0).double()
        train_steps(model, plain_sgd(model.parameters()), rank, range(3))
        alone.append(model.norm.running_var)
    assert torch.allclose(first, (alone[0] + alone[1]) / 2, rtol=1e-12)


@pytest.mark.parametrize("q", [0.0, -1.0, 1.5])
def test_a_pull_that_is_none(q: float) -> None:
    with pytest.raises(ConfigError, match=f"q = {q} is no pull"):
        train_threads(1, 1, outer=local_sgd(), q=q)
