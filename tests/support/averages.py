"""Workers of the averaging tests, and the serial simulation that they are compared with.

The simulation is written from the equations alone: dicts of tensors, no flat memory, no hooks, no
ranks. Everything is float64, so that differences of more than rounding show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.metrics import ExchangeMetrics
from ganglion.execute.comm import World, run_threads

LR = 0.05
Weights = dict[str, Tensor]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    return redraw(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), seed).to(dtype)


def redraw(model: nn.Module, seed: int) -> nn.Module:
    """Draw the weights anew: threads share torch's own random numbers, and would race for them."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.4, 0.4, generator=draw)
    return model


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    x, noise = torch.randn(8, 5, generator=draw), torch.randn(8, 3, generator=draw)
    return x.to(dtype), (x[:, :3] + 0.3 * noise).to(dtype)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


class Trained(NamedTuple):
    """The results of one worker."""

    weights: Weights
    center: Weights
    losses: list[float]
    metrics: ExchangeMetrics


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> list[float]:
    """The loop of a user, untouched by averaging."""
    losses = []
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = batch(rank, step, dtype)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def copies(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_worker(
    world: World,
    num_steps: int,
    optimizer_of: OptimizerFactory = plain_sgd,
    dtype: torch.dtype = torch.float64,
    make: Callable[..., nn.Module] = make_model,
    **settings: Any,
) -> Trained:
    """Train with averaging; every worker begins with weights of its own, to be replaced."""
    model = make(dtype, seed=world.rank)
    optimizer = optimizer_of(model.parameters())
    average = ElasticAverage(model, optimizer, world=world, **settings)
    with average:
        losses = train_steps(model, optimizer, world.rank, range(num_steps))
    weights = copies(model)
    with average.center_weights():
        center = copies(model)
    metrics = average.metrics()
    average.close()
    return Trained(weights, center, losses, metrics)


def train_threads(num_workers: int, num_steps: int, **settings: Any) -> list[Trained]:
    """Train one worker a thread."""
    inner = settings.get("inner", 1)
    mesh = Mesh(data=num_workers // inner, x=inner)
    return run_threads(mesh, lambda world: train_worker(world, num_steps, **settings))


# --- the serial simulation ------------------------------------------------------------------------


def gradient(model: nn.Module, weights: Weights, rank: int, step: int) -> Weights:
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    x, y = batch(rank, step)
    loss = loss_of(functional_call(model, leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def serial_easgd(
    num_workers: int, num_steps: int, *, alpha: float, tau: int = 1, momentum: float = 0.0
) -> tuple[list[Weights], Weights]:
    """w' = w + v' - alpha (w - c), v' = mu v - lr g(w), c' = c + alpha sum(w - c)."""
    model = make_model()
    center = copies(model)
    workers = [copies(model) for _ in range(num_workers)]
    speeds = [{name: torch.zeros_like(w) for name, w in center.items()} for _ in workers]
    for step in range(num_steps):
        exchanges = step % tau == 0
        forces: list[Weights] = []
        for rank, (worker, speed) in enumerate(zip(workers, speeds, strict=True)):
            slope = gradient(model, worker, rank, step)
            forces.append({n: alpha * (w - center[n]) for n, w in worker.items()})
            for name, w in worker.items():
                speed[name] = momentum * speed[name] - LR * slope[name]
                worker[name] = w + speed[name] - (forces[rank][name] if exchanges else 0.0)
        if exchanges:
            center = {n: c + sum(f[n] for f in forces) for n, c in center.items()}
    return workers, center


def assert_near(found: Weights, wanted: Weights, tolerance: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=tolerance, atol=tolerance), name


def assert_same_bits(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
