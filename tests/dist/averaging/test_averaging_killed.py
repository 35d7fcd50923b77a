"""Workers of synchronous methods that are killed: an exchange is applied by all others or by none.

Weights are the same in all elements and gradients are off, so everything is a few numbers, and
what the survivors have must be the simulation of one and the same number of exchanges.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ganglion.decide.topology import Mesh
from ganglion.errors import PeerLost
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.outer import diloco
from ganglion.execute.comm import World, torch_world
from tests.support.crew import Crew

BETA, DOOMED_AT, NUM_AFTER = 0.9, 5, 5
# Far longer than a test may take: whoever hears of a death by the deadline only is too late.
LONG_S = 300.0


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path)
    yield made
    made.close()


class Flat(nn.Module):
    """Weights without a slope."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5000, dtype=torch.float64))

    def forward(self) -> Tensor:
        return (self.w * 0.0).sum()


def meet(folder: Path, name: str, rank: int, num_ranks: int, transport: str) -> World:
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(str(folder / name), num_ranks)
    timeout = timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    return torch_world(rank, Mesh(data=num_ranks), timeout_s=LONG_S, transport=transport)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()


def work(
    folder: Path, rank: int, victim: int, phase: str, transport: str, wishes: dict[str, Any]
) -> dict[str, Any]:
    """Train with three, lose one of them in step 5, and go on with two."""
    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = meet(folder, "three", rank, 3, transport)
    average = ElasticAverage(model, optimizer, world=world, tau=1, **options(wishes))
    with torch.no_grad():
        model.w.add_(rank + 1.0)
    with average:
        train(model, optimizer, DOOMED_AT)
        if rank == victim:
            meet_doom(phase, average)
        with pytest.raises(PeerLost):
            train(model, optimizer, 50)
        world.close()
        place = sorted({0, 1, 2} - {victim}).index(rank)
        average.regroup(meet(folder, "two", place, 2, transport))
        resumed_at = average.metrics().num_exchanges
        optimizer.zero_grad()
        train(model, optimizer, NUM_AFTER)
        metrics = average.metrics()
        with average.center_weights():
            center = model.w.detach().clone()
        average.close()
    assert float((model.w.max() - model.w.min()).detach()) == 0.0, "torn weights"
    assert float(center.max() - center.min()) == 0.0, "a torn centre"
    return {
        "weight": float(model.w.detach()[0]),
        "center": float(center[0]),
        "resumed_at": resumed_at,
        "exchanges": metrics.num_exchanges,
        "workers": metrics.num_workers,
    }


def options(wishes: dict[str, Any]) -> dict[str, Any]:
    return {"outer": diloco(), "q": 0.5} if "outer" in wishes else {"beta": BETA, **wishes}


def meet_doom(phase: str, average: ElasticAverage) -> None:
    """Let this process be killed at some phase of its next exchange."""
    method: Any = average._method
    votes = method._votes[0] if isinstance(method._votes, list) else method._votes
    if phase == "before":
        kill()
    elif phase == "data_sent":
        votes.start = lambda worker: kill()
    elif phase == "all_sent":
        votes.start = then(votes.start, lambda: time.sleep(0.3))
    elif phase == "came":
        votes.wait = then(votes.wait, lambda: None)
    else:
        assert phase == "applied"
        method.turns.on_votes = then(method.turns.on_votes, lambda: None)


def then(call: Callable[..., Any], before_death: Callable[[], None]) -> Callable[..., Any]:
    """Return the same call, which is the last."""

    def last(*args: Any) -> Any:
        call(*args)
        before_death()
        kill()

    return last


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- the simulation ------------------------------------------------------------------------------


class Numbers:
    """Three workers and their centre, each one number."""

    def __init__(self) -> None:
        self.center, self.workers = 1.0, {rank: rank + 2.0 for rank in range(3)}
        self._speed = 0.0

    def exchange(self, wishes: dict[str, Any]) -> None:
        if "outer" in wishes:
            self._descend()
            return
        alpha = BETA / len(self.workers)
        forces = {rank: alpha * (w - self.center) for rank, w in self.workers.items()}
        self.center += sum(forces.values())
        self.workers = {rank: w - forces[rank] for rank, w in self.workers.items()}

    def _descend(self) -> None:
        """SGD with Nesterov momentum (0.7, 0.9), then half the way to the centre."""
        slope = self.center - sum(self.workers.values()) / len(self.workers)
        self._speed = 0.9 * self._speed + slope
        self.center -= 0.7 * (slope + 0.9 * self._speed)
        self.workers = {r: w + 0.5 * (self.center - w) for r, w in self.workers.items()}


def simulate(wishes: dict[str, Any], victim: int, num_together: int, num_later: int) -> Numbers:
    numbers = Numbers()
    for _ in range(num_together):
        numbers.exchange(wishes)
    del numbers.workers[victim]
    for _ in range(num_later):
        numbers.exchange(wishes)
    return numbers


# --- tests ----------------------------------------------------------------------------------------

REPLICATED: dict[str, Any] = {}
ROOT = {"center": "root"}
OUTER = {"outer": "diloco"}


@pytest.mark.parametrize(
    ("phase", "victim", "transport", "wishes"),
    [
        ("before", 2, "shm", REPLICATED),
        ("before", 0, "torch", REPLICATED),
        ("data_sent", 1, "shm", REPLICATED),
        ("data_sent", 2, "torch", REPLICATED),
        ("data_sent", 0, "shm", OUTER),
        ("all_sent", 2, "shm", REPLICATED),
        ("all_sent", 0, "torch", REPLICATED),
        ("all_sent", 1, "shm", ROOT),
        ("all_sent", 2, "torch", OUTER),
        ("came", 0, "shm", REPLICATED),
        ("came", 2, "shm", OUTER),
        ("applied", 1, "shm", REPLICATED),
        ("applied", 2, "torch", ROOT),
    ],
)
def test_survivors_apply_an_exchange_together_or_not_at_all(
    crew: Crew, phase: str, victim: int, transport: str, wishes: dict[str, Any]
) -> None:
    for rank in range(3):
        crew.start(f"w{rank}", work, rank, victim, phase, transport, wishes)
    assert crew.await_death(f"w{victim}") == signal.SIGKILL
    found = {rank: crew.result(f"w{rank}") for rank in {0, 1, 2} - {victim}}
    (resumed_at,) = {one["resumed_at"] for one in found.values()}
    # A worker whose vote was never cast cannot have been agreed with; once it knows that all
    # agreed, the others know it too, or learn of it when they meet again.
    allowed = {"before": {5}, "data_sent": {5}, "all_sent": {5, 6}, "came": {5, 6}, "applied": {6}}
    assert resumed_at in allowed[phase]
    numbers = simulate(wishes, victim, resumed_at, NUM_AFTER)
    for rank, one in found.items():
        assert one["workers"] == 2
        assert one["exchanges"] == resumed_at + NUM_AFTER
        assert one["weight"] == pytest.approx(numbers.workers[rank], abs=1e-12)
        if "center" not in wishes or rank == min(found):
            assert one["center"] == pytest.approx(numbers.center, abs=1e-12)
