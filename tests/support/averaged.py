"""Elastic averaging of whole runs, written out: workers one after the other in one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ganglion import Plan
from ganglion.execute.averaging.methods.outer import OuterFactory, local_sgd
from ganglion.execute.comm import World
from ganglion.execute.models import cross_entropy
from ganglion.execute.train import Run
from tests.support.serial import Batch, assert_same_by_name, copies
from tests.support.tensors import Held, whole
from tests.support.training import (
    FACTORIES,
    Case,
    History,
    make_batches,
    make_model,
    make_run,
    share_of,
)

Weights = dict[str, Tensor]


@dataclass
class Expected:
    """The weights of workers and centre after all steps, and the losses and norms of each step."""

    workers: list[Weights]
    center: Weights
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    center_loss: float = 0.0


def train_workers(
    case: Case,
    num_workers: int,
    *,
    tau: int,
    alpha: float | None,
    in_turn: bool = False,
    outer: OuterFactory | None = None,
) -> Expected:
    """Train with nothing but torch; without an alpha, local SGD: every worker goes to the mean.

    With `in_turn`, one worker after the other is drawn; `outer` moves the centre to the mean.
    """
    models = [make_model(case) for _ in range(num_workers)]
    optimizers = [FACTORIES[case.optimizer](list(m.named_parameters())) for m in models]
    center = copies(dict(models[0].named_parameters()))
    expected = Expected([], center)
    moving = [nn.Parameter(tensor) for tensor in center.values()]  # the centre's own memory
    mover = (outer or local_sgd())(moving)
    for step, batch in enumerate(make_batches(case)):
        losses, norms, before = [], [], [copies(dict(m.named_parameters())) for m in models]
        for model, optimizer, part in zip(
            models, optimizers, shares(batch, num_workers), strict=True
        ):
            model.zero_grad()
            loss = cross_entropy(model(part[0]), part[1])
            loss.backward()
            limit = case.max_grad_norm or float("inf")
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            losses.append(loss.item())
            optimizer.step()
        expected.losses.append(sum(losses) / num_workers)
        expected.norms.append(sum(norms) / num_workers)
        if alpha is not None and step % tau == 0:
            _draw(models, before, center, alpha, in_turn)
        if alpha is None and (step + 1) % tau == 0:
            _gather(models, dict(zip(center, moving, strict=True)), mover)
    expected.workers = [copies(dict(model.named_parameters())) for model in models]
    expected.center_loss = _loss_of_center(models[0], center, case)
    return expected


def shares(batch: Batch, number: int) -> list[Batch]:
    return list(zip(batch[0].chunk(number), batch[1].chunk(number), strict=True))


@torch.no_grad()
def _draw(
    models: list[nn.Module],
    before: list[Weights],
    center: Weights,
    alpha: float,
    in_turn: bool,
) -> None:
    """Apply the elastic force of the weights before the step, to workers and to the centre."""
    old = center if in_turn else copies(center)
    for model, weights in zip(models, before, strict=True):
        for name, parameter in model.named_parameters():
            force = alpha * (weights[name] - old[name])
            parameter -= force
            center[name] += force


@torch.no_grad()
def _gather(
    models: list[nn.Module], center: dict[str, nn.Parameter], mover: torch.optim.Optimizer
) -> None:
    for name, parameter in center.items():
        every = [dict(model.named_parameters())[name] for model in models]
        parameter.grad = parameter - torch.stack([p.detach() for p in every]).mean(0)
    mover.step()
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.copy_(center[name])


@torch.no_grad()
def _loss_of_center(model: nn.Module, center: Weights, case: Case) -> float:
    for name, parameter in model.named_parameters():
        parameter.copy_(center[name])
    inputs, targets = make_batches(case)[0]
    return cross_entropy(model(inputs), targets).item()


@dataclass(frozen=True)
class WorkerSaw:
    """The tensors and numbers of one rank of a run with averaging."""

    held: Held
    center: Weights
    center_loss: float
    num_exchanges: int


def train_averaged(world: World, plan: Plan, case: Case) -> WorkerSaw:
    run = make_run(world, plan, case)
    batches = make_batches(case)
    history = History()
    for result in run.steps(share_of(batch, world, plan) for batch in batches):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    found = seen(run, case, history)
    run.close()
    return found


def seen(run: Run, case: Case, history: History) -> WorkerSaw:
    world, plan = run.world, run.plan
    loss = run._parts.executor.evaluate(share_of(make_batches(case)[0], world, plan))
    table = run._parts.executor.gather_numbers([loss or 0.0, float(loss is not None)])
    history.weights = copies(run.model_tensors())
    metrics = run.exchanges()
    return WorkerSaw(
        held=Held(history, run.placements(), world.coordinates, world.mesh),
        center=copies(run._parts.shared_tensors()),
        center_loss=float(table[:, 0].sum() / table[:, 1].sum()),
        num_exchanges=0 if metrics is None else metrics.num_exchanges,
    )


def assert_equals(found: list[WorkerSaw], expected: Expected, *, drifts: bool = False) -> None:
    """Compare everything; with `drifts`, losses depend on time and are not compared."""
    for one in found:
        history = one.held.history
        if not drifts:
            torch.testing.assert_close(history.losses, expected.losses, rtol=1e-9, atol=0)
            torch.testing.assert_close(history.norms, expected.norms, rtol=1e-9, atol=0)
        assert len(history.losses) == len(expected.losses)
        assert abs(one.center_loss - expected.center_loss) < 1e-9
    for worker, weights in enumerate(expected.workers):
        mine = [one for one in found if one.held.coordinates.data == worker]
        held = [dataclasses.replace(one.held, mesh=one.held.mesh) for one in mine]
        assert_same_by_name(whole(held, [one.held.history.weights for one in mine]), weights)
        assert_same_by_name(whole(held, [one.center for one in mine]), expected.center)
