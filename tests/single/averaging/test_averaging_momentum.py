"""The momentum of a served centre outlives a checkpoint, to the last bit in a fixed order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ganglion.decide.plan import ROUND_ROBIN
from ganglion.decide.schedules.exchanges.served import JOIN, PUSH, OrderEntry
from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.served.methods import ServedSgd
from ganglion.execute.averaging.served.rules import Additive
from ganglion.execute.averaging.served.server import CenterServer
from ganglion.execute.averaging.served.shards import ShardedCenter, shard_bounds
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    LR,
    assert_same_bits,
    batch,
    copies,
    loss_of,
    make_model,
    plain_sgd,
    redraw,
    train_steps,
)

NUM_WORKERS, NUM_SHARDS, DEADLINE_S = 3, 2, 20.0
MOMENTUM = 0.8
State = dict[str, Any]


def with_buffers() -> nn.Module:
    """Running statistics are part of the centre and have no momentum."""
    return redraw(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)), 0).double()


def work(
    store: Any, worker: int, steps: range, saved: State | None, meeting: threading.Barrier
) -> State:
    """Train one worker from a state, or from the start; return its state."""
    model = with_buffers()
    packed = Packed(model)
    center = ShardedCenter(
        store,
        packed.flat,
        run_id="moving",
        worker=worker,
        num_shards=NUM_SHARDS,
        timeout_s=DEADLINE_S,
    )
    method = ServedSgd(packed, center, num_workers=NUM_WORKERS, has_momentum=True)
    meeting.wait(DEADLINE_S)
    if saved is not None:
        if worker == 0:
            center.restore(saved["center"], saved["velocity"])
        packed.gather().copy_(saved["weights"])
        method.load_state_dict(saved)
    meeting.wait(DEADLINE_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in steps:
        x, y = batch(worker, step)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(LR)
    meeting.wait(DEADLINE_S)
    state = {**method.state_dict(), "weights": packed.gather().clone()}
    meeting.wait(DEADLINE_S)
    method.close()
    return state


def run(steps: range, order: str | Sequence[OrderEntry], saved: list[State] | None) -> list[State]:
    """Train all workers in an order of the server; return their states."""
    store, meeting = dist.HashStore(), threading.Barrier(NUM_WORKERS)
    first = Packed(with_buffers())

    def body(world: World) -> State:
        if world.rank >= NUM_SHARDS:
            worker = world.rank - NUM_SHARDS
            return work(store, worker, steps, None if saved is None else saved[worker], meeting)
        begin, end = shard_bounds(first.numel, NUM_SHARDS)[world.rank]
        trained = min(max(0, first.num_trained - begin), end - begin)
        CenterServer(
            first.flat[begin:end].clone(),
            Additive(MOMENTUM, num_trained=trained),
            store,
            run_id="moving",
            num_workers=NUM_WORKERS,
            shard=world.rank,
            order=order,
            timeout_s=DEADLINE_S,
        ).serve()
        return {}

    mesh = Mesh(data=NUM_WORKERS + NUM_SHARDS)
    return run_threads(mesh, body, timeout_s=DEADLINE_S)[NUM_SHARDS:]


def script(rounds: Sequence[tuple[int, ...]]) -> list[OrderEntry]:
    """All join, then each round lets every worker push once, in its own order."""
    joins = [OrderEntry(JOIN, worker) for worker in range(NUM_WORKERS)]
    return joins + [OrderEntry(PUSH, worker) for turn in rounds for worker in turn]


ROUNDS = [(2, 0, 1), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0), (0, 1, 2)]


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_resumed_centre_moves_on_to_the_last_bit(is_replayed: bool) -> None:
    orders: list[Any] = [ROUND_ROBIN] * 3
    if is_replayed:
        orders = [script(ROUNDS), script(ROUNDS[:3]), script(ROUNDS[3:])]
    whole = run(range(6), orders[0], None)
    half = run(range(3), orders[1], None)
    resumed = run(range(3, 6), orders[2], half)
    assert float(half[0]["velocity"].norm()) > 0
    for wanted, found in zip(whole, resumed, strict=True):
        for name in ("center", "velocity", "weights", "base"):
            assert torch.equal(found[name], wanted[name]), name


def test_a_centre_that_lost_its_momentum_takes_another_way() -> None:
    whole = run(range(6), ROUND_ROBIN, None)
    half = run(range(3), ROUND_ROBIN, None)
    for state in half:
        state["velocity"].zero_()
    resumed = run(range(3, 6), ROUND_ROBIN, half)
    assert not torch.equal(resumed[0]["center"], whole[0]["center"])


def averaged(world: World) -> tuple[nn.Module, Any, ElasticAverage]:
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    wishes: dict[str, Any] = {"mode": "async_sgd", "center_momentum": MOMENTUM, "tau": 1}
    return model, optimizer, ElasticAverage(model, optimizer, world=world, **wishes)


def test_a_full_checkpoint_keeps_the_momentum_and_one_of_the_centre_does_not() -> None:
    """Of one worker, whose order is its own."""

    def straight(world: World) -> Any:
        model, optimizer, average = averaged(world)
        with average:
            train_steps(model, optimizer, 0, range(3))
            full, center = average.state_dict(), average.state_dict("center_only")
            train_steps(model, optimizer, 0, range(3, 6))
        average.close()
        return full, center, copies(model)

    def resumed(world: World, state: State) -> Any:
        model, optimizer, average = averaged(world)
        average.load_state_dict(state)
        velocity = average.state_dict()["method"]["velocity"]
        with average:
            train_steps(model, optimizer, 0, range(3, 6))
        average.close()
        return copies(model), velocity

    (one,) = run_threads(Mesh(), straight)
    full, center, wanted = one
    assert "velocity" not in center["method"]
    (found,) = run_threads(Mesh(), lambda world: resumed(world, full))
    assert_same_bits(found[0], wanted)
    assert torch.equal(found[1], full["method"]["velocity"])
    (anew,) = run_threads(Mesh(), lambda world: resumed(world, center))
    assert not anew[1].any()
