"""Prices of messages in the averaging benchmark: each one is paid for, and no weight changes."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.averaging import delay
from ganglion.decide.schedules.exchanges.elastic_rates import ElasticRate
from ganglion.decide.simulator.averaging.costs import MessagePrice
from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.methods.centers import ReplicatedCenter
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.shared_center import SharedCenter
from ganglion.execute.averaging.methods.sums import GroupSum, Meter
from ganglion.execute.averaging.served import server
from ganglion.execute.averaging.served.methods import ServedEasgd
from ganglion.execute.averaging.served.rules import Elastic
from ganglion.execute.averaging.served.shards import ShardedCenter
from ganglion.execute.comm import SoloGroup, World, run_threads
from tests.support.averages import LR, assert_same_bits, make_model, train_threads, train_worker

DEADLINE_S = 20.0
ROOT: dict[str, Any] = {"beta": 0.9, "tau": 1, "center": "root", "deterministic": True}


@pytest.mark.parametrize(
    ("wishes", "number"),
    [
        ({"mode": "sync_sgd", "deterministic": True}, 3 + 3),
        (ROOT, (3 + 3) + (3 + 3)),  # centre down, weights up; votes up, votes down
        ({**ROOT, "pack": False}, 4 * 6 + 6),  # four tensors
    ],
)
def test_every_message_along_a_tree_is_paid_for(wishes: dict[str, Any], number: int) -> None:
    def body(world: World) -> tuple[Any, int]:
        carrier = delay.Carrier(MessagePrice())
        trained = train_worker(delay.slow_world(world, carrier), 3, **wishes)
        return trained, carrier.num_messages

    found = run_threads(Mesh(data=4), body)
    assert sum(paid for _, paid in found) == 3 * number
    for (trained, _), plain in zip(found, train_threads(4, 3, **wishes), strict=True):
        assert_same_bits(trained.weights, plain.weights)


def test_a_listener_is_busy_with_one_message_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = delay.Carrier(MessagePrice())
    monkeypatch.setattr(server, "CenterListener", partial(delay.SlowListener, carrier=carrier))
    store, packed = dist.HashStore(), Packed(make_model())
    first = packed.flat.clone()
    center = server.CenterServer(
        first, Elastic(), store, run_id="door", num_workers=1, timeout_s=DEADLINE_S
    )
    thread = threading.Thread(target=center.serve, daemon=True)
    thread.start()
    sharded = ShardedCenter(store, packed.flat, run_id="door", worker=0, timeout_s=DEADLINE_S)
    rate = ElasticRate(None, 0.9, None)
    method = ServedEasgd(packed, sharded, rate, lambda: LR, num_workers=1, tau=1)
    method.sync_now(LR)
    method.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert carrier.num_messages == 2 + 2 + 1  # join, exchange, and a goodbye without an answer


def test_shared_memory_is_read_and_written_at_a_price() -> None:
    carrier = delay.Carrier(MessagePrice())
    slow = delay.SlowMemory(SharedCenter.in_process(torch.zeros(400), 2), carrier)
    slow.add(1, torch.ones(400))
    found = torch.empty(400)
    slow.read(found)
    assert torch.equal(found, torch.ones(400)) and slow.version == 1
    assert carrier.num_messages == 2


def test_a_centre_on_a_host_costs_a_copy_each_way() -> None:
    carrier, meter = delay.Carrier(MessagePrice(1e-3, 0.0)), Meter()
    worker = torch.ones(400)
    sums = GroupSum(SoloGroup(0), worker, [(0, 400)], meter)
    slow = delay.HostCopies(ReplicatedCenter(torch.zeros(400), sums, SoloGroup(0)), carrier, meter)
    slow.start(worker)
    slow.wait()
    force = slow.apply(worker, 0.5, 1)
    assert torch.equal(force, 0.5 * worker) and torch.equal(slow.flat, 0.5 * worker)
    assert carrier.num_messages == 2
    assert meter.wait_s >= carrier.carried_s(0.0, float("inf")) >= 2e-3


def test_small_messages_can_be_free_and_weights_come_in_parts() -> None:
    price = MessagePrice(1e-3, 1e-9)
    carrier = delay.Carrier(price, 10, small_are_free=True)
    slept = [carrier.carry(16), carrier.carry(100_000)]
    assert slept[0] == 0.0 and slept[1] >= price.of(100_000, 10)
    assert carrier.num_messages == 1
    assert carrier.carried_s(0.0, float("inf")) == pytest.approx(slept[1])
    assert carrier.carried_s(0.0, 1e-9) == 0.0
