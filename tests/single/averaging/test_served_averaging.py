"""A served centre and its workers, as threads: equal to a serial loop that follows their order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ganglion.decide.plan import ROUND_ROBIN
from ganglion.decide.schedules.exchanges.elastic_rates import ElasticRate
from ganglion.decide.schedules.exchanges.served import (
    EXCHANGE,
    FIRST_COME,
    JOIN,
    LEAVE,
    PUSH,
    OrderEntry,
)
from ganglion.decide.topology import Mesh
from ganglion.errors import CheckpointError, ConfigError, PeerLost, ProtocolError
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.served.center_link import CenterLink
from ganglion.execute.averaging.served.connections import CenterClient, Store
from ganglion.execute.averaging.served.methods import ServedEasgd, ServedSgd
from ganglion.execute.averaging.served.rules import Additive, Elastic, Rule
from ganglion.execute.averaging.served.server import CenterServer
from ganglion.execute.averaging.served.shards import ShardedCenter, shard_bounds
from ganglion.execute.averaging.served.snapshot import Snapshots, load_snapshot
from ganglion.execute.averaging.served.wire import Block, Endpoint, Envelope, open_block
from ganglion.execute.comm import World, run_threads

RUN = "threads"
ALPHA, LR = 0.2, 0.05
DEADLINE_S = 20.0
NUM_IN, NUM_OUT, BATCH = 5, 3, 4
Order = str | Sequence[OrderEntry]


@dataclass(frozen=True)
class Kind:
    """One method: what the worker is, what the server does, and the worker's own momentum."""

    method: str = "easgd"  # or "sgd"
    momentum: float = 0.0
    master: float = 0.0  # momentum at the master
    tau: int = 1
    overlap: bool = True
    lr: float = LR

    def rule(self) -> Rule:
        return Additive(self.master) if self.method == "sgd" else Elastic()


KINDS = {
    "async_easgd": Kind(),
    "async_easgd_tau": Kind(tau=3),
    "async_easgd_waiting": Kind(overlap=False),
    "async_measgd": Kind(momentum=0.9),
    "async_sgd": Kind("sgd"),
    "async_msgd_at_master": Kind("sgd", master=0.8),
    "async_msgd_at_worker": Kind("sgd", momentum=0.8),
    "downpour": Kind("sgd", tau=4),
}


@dataclass
class Outcome:
    """What a run left behind: the centre, each worker's weights, and the order of the server."""

    center: Tensor
    weights: dict[int, Tensor] = field(default_factory=dict)
    record: list[OrderEntry] = field(default_factory=list)
    metrics: Any = None
    server: Any = None


def batch_of(worker: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(BATCH, NUM_IN, generator=draw, dtype=torch.float64)
    targets = torch.randn(BATCH, NUM_OUT, generator=draw, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(NUM_IN, NUM_OUT, dtype=torch.float64).to(dtype)


def make_method(kind: Kind, packed: Packed, center: ShardedCenter, num_workers: int) -> Any:
    if kind.method == "sgd":
        return ServedSgd(packed, center, num_workers=num_workers, tau=kind.tau)
    return ServedEasgd(
        packed,
        center,
        ElasticRate(alpha=ALPHA),
        lambda: kind.lr,
        num_workers=num_workers,
        tau=kind.tau,
        overlap=kind.overlap,
    )


def train(
    store: Store,
    kind: Kind,
    worker: int,
    num_workers: int,
    num_steps: int,
    dtype: torch.dtype = torch.float64,
    num_shards: int = 1,
    on_step: Callable[[int], None] = lambda step: None,
) -> tuple[Tensor, Any]:
    """Run one worker; return its weights, as one vector, and its metrics."""
    model = make_model(dtype)
    packed = Packed(model)
    center = ShardedCenter(
        store,
        packed.flat,
        run_id=RUN,
        worker=worker,
        num_shards=num_shards,
        timeout_s=DEADLINE_S,
    )
    method = make_method(kind, packed, center, num_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=kind.lr, momentum=kind.momentum)
    for step in range(num_steps):
        on_step(step)
        inputs, targets = batch_of(worker, step, dtype)
        method.begin_pass()
        (0.5 * (model(inputs) - targets).square().sum() / BATCH).backward()  # type: ignore[no-untyped-call]
        method.before_step(kind.lr)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(kind.lr)
    metrics = method.metrics()
    method.close()
    return packed.gather().clone(), metrics


def run(
    kind: Kind,
    num_workers: int = 3,
    num_steps: int = 8,
    *,
    dtype: torch.dtype = torch.float64,
    num_shards: int = 1,
    order: Order = FIRST_COME,
    max_staleness: int | None = None,
    listen_on: str | None = None,
) -> Outcome:
    """Run servers and workers as threads: the first ranks serve."""
    store = dist.HashStore()
    first = Packed(make_model(dtype)).flat
    outcome = Outcome(first.clone())

    def serve(shard: int) -> None:
        begin, end = shard_bounds(first.numel(), num_shards)[shard]
        server = CenterServer(
            first[begin:end].clone(),
            kind.rule(),
            store,
            run_id=RUN,
            num_workers=num_workers,
            shard=shard,
            order=order,
            max_staleness=max_staleness,
            timeout_s=DEADLINE_S,
            listen_on=listen_on,
            is_recording=True,
        )
        server.serve()
        outcome.center[begin:end] = server.center
        outcome.record = server.books.record or []
        outcome.server = server.metrics()

    def body(world: World) -> None:
        worker = world.rank - num_shards
        if worker < 0:
            return serve(world.rank)
        weights, metrics = train(store, kind, worker, num_workers, num_steps, dtype, num_shards)
        outcome.weights[worker] = weights
        outcome.metrics = metrics

    run_threads(Mesh(data=num_workers + num_shards), body, timeout_s=DEADLINE_S)
    return outcome


# --- the serial simulation, which shares no code with what it checks ----------------------------


@dataclass
class Walker:
    """One worker of the simulation."""

    weights: Tensor
    velocity: Tensor
    base: Tensor
    num_steps: int = 0


class Serial:
    """Workers and a centre in one loop, in the order of a record."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        model = make_model()
        weight, bias = (p.detach().clone() for p in model.parameters())
        self.center = torch.cat([weight.flatten(), bias])
        self.velocity = torch.zeros_like(self.center)
        self.walkers: dict[int, Walker] = {}

    def follow(self, record: Iterable[OrderEntry], num_steps: int) -> None:
        for event in record:
            verdict = "" if event.is_served else "refused_"
            getattr(self, f"{verdict}{event.kind}_{self.kind.method}")(event.worker)
        for worker, walker in self.walkers.items():
            while walker.num_steps < num_steps:
                self.step(worker, torch.zeros_like(self.center))

    def step(self, worker: int, force: Tensor) -> None:
        """One local step of heavy-ball SGD; the gradient is of the weights without the force."""
        walker = self.walkers[worker]
        inputs, targets = batch_of(worker, walker.num_steps, torch.float64)
        weight = walker.weights[: NUM_IN * NUM_OUT].view(NUM_OUT, NUM_IN)
        error = (inputs @ weight.T + walker.weights[NUM_IN * NUM_OUT :] - targets) / BATCH
        gradient = torch.cat([(error.T @ inputs).flatten(), error.sum(0)])
        walker.velocity = self.kind.momentum * walker.velocity + gradient
        walker.weights = walker.weights - self.kind.lr * walker.velocity - force
        walker.num_steps += 1

    def until_due(self, worker: int) -> Walker:
        walker = self.walkers[worker]
        while walker.num_steps % self.kind.tau:
            self.step(worker, torch.zeros_like(self.center))
        return walker

    def join_easgd(self, worker: int) -> None:
        zero = torch.zeros_like(self.center)
        self.walkers[worker] = Walker(self.center, zero, self.center)

    join_sgd = join_easgd

    def leave_easgd(self, worker: int) -> None:
        """What it gave stays, and alpha is the same: it was given."""

    leave_sgd = leave_easgd

    def exchange_easgd(self, worker: int) -> None:
        force = ALPHA * (self.until_due(worker).weights - self.center)
        self.center = self.center + force
        self.step(worker, force)

    def refused_push_sgd(self, worker: int) -> None:
        walker = self.walkers[worker]
        for _ in range(self.kind.tau):
            self.step(worker, torch.zeros_like(self.center))
        walker.weights = walker.base = self.center

    def push_sgd(self, worker: int) -> None:
        walker = self.walkers[worker]
        for _ in range(self.kind.tau):
            self.step(worker, torch.zeros_like(self.center))
        update = walker.weights - walker.base
        self.velocity = self.kind.master * self.velocity + update
        self.center = self.center + self.velocity
        walker.weights = walker.base = self.center


def unpadded(flat: Tensor) -> Tensor:
    packed = Packed(make_model())
    return torch.cat([view.flatten() for view in packed.views(flat).values()])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_equals_the_serial_loop_in_the_same_order(name: str, max_staleness: int | None) -> None:
    kind, num_steps = KINDS[name], 8
    found = run(kind, 3, num_steps, max_staleness=max_staleness)
    serial = Serial(kind)
    serial.follow(found.record, num_steps)
    assert len(found.record) > 3
    torch.testing.assert_close(unpadded(found.center), serial.center, rtol=0, atol=1e-12)
    for worker, weights in found.weights.items():
        wanted = serial.walkers[worker].weights
        torch.testing.assert_close(unpadded(weights), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["async_easgd", "async_msgd_at_master"])
def test_a_replay_of_the_recorded_order_is_bitwise_equal(name: str) -> None:
    """Also without overlap, and over TCP: only the order decides the bits."""
    kind = KINDS[name]
    first = run(kind, dtype=torch.float32)
    waiting = dataclasses.replace(kind, overlap=False)
    again = run(waiting, dtype=torch.float32, order=first.record, listen_on="127.0.0.1")
    assert again.record == first.record
    assert torch.equal(again.center, first.center)
    assert all(torch.equal(again.weights[i], first.weights[i]) for i in range(3))
    joins = [event for event in first.record if event.kind == JOIN]
    turned = [*joins, *(event for event in first.record[::-1] if event.kind != JOIN)]
    assert not torch.equal(run(kind, dtype=torch.float32, order=turned).center, first.center)


def test_round_robin_equals_first_come_in_the_forced_order() -> None:
    """Original EASGD, with and without overlap, is Async EASGD with the order taken away."""
    forced = [OrderEntry(JOIN, i) for i in range(3)] + 5 * [
        OrderEntry(EXCHANGE, i) for i in range(3)
    ]
    wanted = run(Kind(), num_steps=5, dtype=torch.float32, order=forced)
    for overlap in (True, False):
        kind = Kind(overlap=overlap)
        found = run(kind, num_steps=5, dtype=torch.float32, order=ROUND_ROBIN)
        turns = [event.worker for event in found.record if event.kind == EXCHANGE]
        assert turns == 5 * [0, 1, 2]
        assert torch.equal(found.center, wanted.center)
        assert all(torch.equal(found.weights[i], wanted.weights[i]) for i in range(3))


def test_shards_together_are_the_whole() -> None:
    whole = run(Kind(momentum=0.9), order=ROUND_ROBIN)
    for num_shards in (2, 3):
        parts = run(Kind(momentum=0.9), order=ROUND_ROBIN, num_shards=num_shards)
        assert torch.equal(parts.center, whole.center)
        assert all(torch.equal(parts.weights[i], whole.weights[i]) for i in range(3))


def test_without_gradients_the_sum_of_all_weights_is_kept() -> None:
    """Each worker is pushed away from where it joined, and all drift together again."""
    store, start = dist.HashStore(), Packed(make_model()).flat.clone()
    begun, found = {}, {}

    def body(world: World) -> Tensor | None:
        if world.rank == 0:
            server = CenterServer(
                start.clone(), Elastic(), store, run_id=RUN, num_workers=3, max_staleness=1
            )
            server.serve()
            return server.center
        packed = Packed(make_model())
        center = ShardedCenter(store, packed.flat, run_id=RUN, worker=world.rank)
        served = make_method(Kind(lr=0.0), packed, center, 3)
        kick = torch.randn(packed.numel, dtype=torch.float64)
        packed.flat.add_(kick)
        begun[world.rank] = packed.flat.clone()
        for _ in range(20):
            served.begin_pass()
            served.before_step(0.0)
            served.after_step(0.0)
        served.close()
        found[world.rank] = packed.gather()
        return None

    end = run_threads(Mesh(data=4), body, timeout_s=DEADLINE_S)[0]
    assert end is not None
    total = end + sum(found.values())
    wanted = start + sum(begun.values())
    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-12)
    assert not torch.equal(end, start)


def test_half_precision_weights_exchange_in_float32() -> None:
    found = run(Kind(), dtype=torch.bfloat16, order=ROUND_ROBIN)
    assert found.center.dtype == torch.float32
    wanted = run(Kind(), dtype=torch.float32, order=ROUND_ROBIN)
    torch.testing.assert_close(found.center, wanted.center, rtol=0, atol=0.05)


def test_metrics_tell_what_happened() -> None:
    found = run(Kind(tau=2), num_workers=3, num_steps=8, order=ROUND_ROBIN)
    metrics, server = found.metrics, found.server
    assert (metrics.num_workers, metrics.num_steps, metrics.num_exchanges) == (3, 8, 4)
    assert metrics.sent_bytes > 4 * found.center.nbytes
    assert metrics.wait_s > 0
    assert metrics.force > 0
    assert metrics.consensus > 0
    assert sum(metrics.staleness.values()) == 4
    assert server.num_exchanges == {0: 4, 1: 4, 2: 4}
    assert server.version == 12
    assert server.lost == {}
    # In a round robin of 3 each misses the 2 others, but for the first round.
    assert server.staleness == {0: 1, 1: 1, 2: 10}


# --- one request after the other, by hand --------------------------------------------------------


class Bench:
    """A server in a thread, and links that a test moves step by step."""

    def __init__(self, numel: int = 8, rule: Rule | None = None, **options: Any) -> None:
        self.store = dist.HashStore()
        self.numel = numel
        options = {"num_workers": 2, "timeout_s": DEADLINE_S, **options}
        start = torch.zeros(numel, dtype=torch.float64)
        rule = Elastic() if rule is None else rule
        self.server = CenterServer(start, rule, self.store, run_id=RUN, **options)

    def link(self, worker: int, **options: Any) -> CenterLink:
        options = {"numel": self.numel, "dtype": torch.float64, **options}
        options = {"timeout_s": DEADLINE_S, **options}
        return CenterLink(self.store, run_id=RUN, worker=worker, **options)

    def play(self, script: Callable[[Bench], None]) -> CenterServer:
        """Serve until the script has ended and all its links have left."""

        def body(world: World) -> None:
            if world.rank == 0:
                self.server.serve()
            else:
                script(self)

        run_threads(Mesh(data=2), body, timeout_s=DEADLINE_S)
        return self.server

    def await_version(self, version: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while self.server.books.version < version:
            assert time.monotonic() < end_s, f"version {version} never came"
            time.sleep(0.001)

    def await_members(self, number: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while len(self.server.books.members) > number:
            assert time.monotonic() < end_s, f"more than {number} workers stay"
            time.sleep(0.001)


def push(link: CenterLink, value: float, rate: float = 1.0, kind: str = EXCHANGE) -> Any:
    link.block.payload.fill_(value)
    link.ask(kind, step=0, rate=rate)
    return link.answer()


def test_who_joins_later_starts_at_the_centre() -> None:
    def script(bench: Bench) -> None:
        early, late = bench.link(0), bench.link(1)
        assert early.join().tolist() == [0.0] * 8
        push(early, 4.0, rate=0.5)
        assert late.join().tolist() == [2.0] * 8
        assert late.version == 1
        assert push(late, 2.0).envelope.staleness == 0
        early.leave()
        late.leave()

    assert Bench().play(script).books.version == 2


def test_a_reply_that_was_lost_is_sent_again_and_the_exchange_counts_once() -> None:
    def script(bench: Bench) -> None:
        link, other = bench.link(0), bench.link(1)
        other.join()
        link.join()
        link.block.payload.fill_(4.0)
        link.ask(EXCHANGE, step=0, rate=0.5)
        bench.await_version(1)
        link._client.disconnect()  # the reply is on the wire, and lost
        push(other, 10.0, rate=0.5)
        answer = link.answer()
        assert answer.payload.tolist() == [0.0] * 8  # the centre the force was reckoned from
        assert answer.envelope.version == 1
        assert push(link, 0.0, rate=0.0).payload.tolist() == [6.0] * 8
        link.leave()
        other.leave()

    server = Bench().play(script)
    assert server.center.tolist() == [6.0] * 8
    assert (server.books.version, server.books.num_repeated) == (3, 1)


def test_a_request_that_never_arrived_is_applied_when_it_is_repeated() -> None:
    def script(bench: Bench) -> None:
        link, other = bench.link(0), bench.link(1)
        link.join()
        other.join()
        link._client.disconnect()
        assert push(link, 4.0, rate=0.5).envelope.version == 1
        assert link.num_connections == 2
        link._client.disconnect()
        assert link.look().tolist() == [2.0] * 8
        link.leave()
        other.leave()

    server = Bench().play(script)
    assert (server.books.version, server.books.num_repeated) == (1, 0)


def test_a_push_that_is_too_old_is_refused_and_brings_the_centre() -> None:
    def script(bench: Bench) -> None:
        fast, slow = bench.link(0), bench.link(1)
        fast.join()
        slow.join()
        for _ in range(3):
            push(fast, 1.0, kind=PUSH)
        refused = push(slow, 100.0, kind=PUSH)
        assert refused.envelope.is_refused
        assert refused.envelope.staleness == 3
        assert refused.payload.tolist() == [3.0] * 8
        assert not push(slow, 1.0, kind=PUSH).envelope.is_refused
        fast.leave()
        slow.leave()

    server = Bench(rule=Additive(), max_staleness=2).play(script)
    assert server.center.tolist() == [4.0] * 8
    assert server.metrics().num_refused == 1


def test_what_a_worker_does_wrong_is_told_to_it_and_the_others_go_on() -> None:
    def script(bench: Bench) -> None:
        good = bench.link(0)
        good.join()
        with pytest.raises(ProtocolError, match="worker 0 joined twice"):
            bench.link(0).join()
        small = bench.link(1, numel=3)
        with pytest.raises(ProtocolError, match=r"centre sent 8 elements.*worker 1 has 3 elements"):
            small.join()
        small.leave()
        confused = bench.link(2)
        confused.join()
        with pytest.raises(ProtocolError, match="sent a push, but the centre serves a exchange"):
            push(confused, 1.0, kind=PUSH)
        confused.leave()
        hasty = bench.link(3)
        hasty._is_member = True
        hasty._number = 6
        hasty._reconnect(time.monotonic() + DEADLINE_S)
        hasty._number = 8
        with pytest.raises(ProtocolError, match="worker 3 sent request 9"):
            push(hasty, 1.0)
        hasty.leave()
        assert push(good, 4.0, rate=0.5).envelope.version == 1
        good.leave()

    server = Bench().play(script)
    assert server.center.tolist() == [2.0] * 8
    assert set(server.metrics().lost) == {1, 2, 3}


def test_a_silent_worker_is_dropped_and_welcome_again() -> None:
    def script(bench: Bench) -> None:
        steady, sleepy = bench.link(0), bench.link(1)
        steady.join()
        sleepy.join()
        push(sleepy, 4.0, rate=0.5)
        end_s = time.monotonic() + DEADLINE_S
        while 1 in bench.server.books.members:
            assert time.monotonic() < end_s
            push(steady, 2.0)
        assert "silent" in bench.server.metrics().lost[1]
        version = bench.server.books.version
        assert push(sleepy, 2.0).envelope.staleness == version - 1
        assert bench.server.books.members == {0, 1}
        steady.leave()
        sleepy.leave()

    server = Bench(timeout_s=1.0).play(script)
    assert server.center.tolist() == [2.0] * 8


def test_a_stalled_worker_loses_its_turn_in_a_round_robin() -> None:
    def script(bench: Bench) -> None:
        steady, sleepy = bench.link(0), bench.link(1)
        steady.join()
        sleepy.join()
        for _ in range(3):
            push(steady, 2.0, rate=0.5)
        assert bench.server.books.members == {0}
        steady.leave()
        sleepy.leave()

    assert Bench(timeout_s=1.0, order=ROUND_ROBIN).play(script).books.version == 3


def test_strangers_are_hung_up_on_and_delay_nobody() -> None:
    def script(bench: Bench) -> None:
        silent, rude = (CenterClient(bench.store, RUN, 9) for _ in range(2))
        address = bench.store.get(f"ganglion/{RUN}/center/0").decode()
        bench.store.set("ganglion/wrong/center/0", address[:-4] + "0000")
        silent.connect(1.0)
        rude = CenterClient(bench.store, "wrong", 9)
        rude.connect(1.0)
        with pytest.raises(PeerLost):
            rude.receive(DEADLINE_S, "an answer")
        links = [bench.link(worker) for worker in (0, 1)]
        for link in links:
            link.join()
            push(link, 1.0)
            link.leave()
        silent.disconnect()
        rude.disconnect()

    assert Bench().play(script).books.version == 2


def test_nobody_waits_for_ever() -> None:
    lonely = Bench(timeout_s=0.2)
    with pytest.raises(PeerLost, match=r"waited 0.2 s for more workers: 2 were expected, \[\] are"):
        lonely.server.serve()
    with pytest.raises(
        PeerLost, match=r"worker 4 could not reach the centre, shard 0, within 0.\d"
    ):
        CenterLink(
            dist.HashStore(), run_id=RUN, worker=4, numel=1, dtype=torch.float32, timeout_s=0.3
        ).join()


def test_a_replay_that_cannot_go_on_names_whom_it_waits_for() -> None:
    bench = Bench(order=[OrderEntry(JOIN, 0), OrderEntry(EXCHANGE, 1)], timeout_s=0.5)

    def script(bench: Bench) -> None:
        link = bench.link(0, timeout_s=1.5)
        link.join()
        with pytest.raises(PeerLost):
            push(link, 1.0)
        link.leave()

    with pytest.raises(PeerLost, match="for worker 1: 2 were expected"):
        bench.play(script)


# --- the header ----------------------------------------------------------------------------------


def sealed(**fields: Any) -> Tensor:
    block = Block(4, torch.float32)
    block.payload.fill_(1.5)
    known = {"kind": EXCHANGE, "run_id": RUN, "worker": 3, "shard": 1, "number": 7, "step": 9}
    return block.seal(Envelope(**(known | {"version": 5, "rate": 0.25} | fields)))


HERE = Endpoint("the centre", RUN, 1, 4, torch.float32)


def test_a_message_tells_all_that_was_put_in() -> None:
    envelope, payload = open_block(sealed(is_refused=True, staleness=2, queue=8), HERE, 3)
    wanted = Envelope(
        kind=EXCHANGE,
        run_id=RUN,
        worker=3,
        shard=1,
        number=7,
        step=9,
        version=5,
        rate=0.25,
        is_refused=True,
        staleness=2,
        queue=8,
    )
    assert envelope == wanted
    assert payload.tolist() == [1.5] * 4


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"run_id": "other"}, "worker 3 sent run 'other', but the centre has run 'threads'"),
        ({"worker": 2}, "worker 3 sent worker 2, but the centre has worker 3"),
        ({"shard": 0}, "worker 3 sent shard 0, but the centre has shard 1"),
    ],
)
def test_a_wrong_header_names_both_sides(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        open_block(sealed(**fields), HERE, 3)


def test_every_byte_is_covered_by_a_check() -> None:
    data = sealed()
    for index in range(len(data)):
        spoiled = data.clone()
        spoiled[index] ^= 0x10
        with pytest.raises(ProtocolError, match="but the centre has"):
            open_block(spoiled, HERE, 3)


def test_another_size_or_dtype_is_named() -> None:
    for side in (
        Endpoint("the centre", RUN, 1, 5, torch.float32),
        Endpoint("it", RUN, 1, 4, torch.float64),
    ):
        with pytest.raises(ProtocolError, match=r"4 elements of torch.float32, but .* has [45] el"):
            open_block(sealed(), side, 3)
    with pytest.raises(ProtocolError, match="a block of bytes"):
        open_block(torch.zeros(3), HERE, 3)
    with pytest.raises(ConfigError, match="1 to 16 ASCII"):
        Endpoint("the centre", "a run id that is too long", 0, 1, torch.float32)
    with pytest.raises(ConfigError, match="bfloat16 cannot be served"):
        Endpoint("the centre", RUN, 0, 1, torch.bfloat16)


# --- shards and snapshots ------------------------------------------------------------------------


def test_shards_cover_every_element_once() -> None:
    assert shard_bounds(10, 3) == ((0, 3), (3, 6), (6, 10))
    assert shard_bounds(4, 4) == ((0, 1), (1, 2), (2, 3), (3, 4))
    with pytest.raises(ConfigError, match="num_shards = 5: give 1 to 4"):
        shard_bounds(4, 5)


def test_a_snapshot_holds_the_centre_its_version_and_the_velocity(tmp_path: Path) -> None:
    path = tmp_path / "center.safetensors"

    def script(bench: Bench) -> None:
        links = [bench.link(worker) for worker in (0, 1)]
        for link in links:
            link.join()
        for link in 3 * links:
            push(link, 1.0, kind=PUSH)
        snapshot = load_snapshot(path)  # written after exchange 4, before the sixth
        assert snapshot.version == 4
        assert snapshot.center[0] == pytest.approx(1 + 1.5 + 1.75 + 1.875)
        for link in links:
            link.leave()

    server = Bench(rule=Additive(0.5), snapshots=Snapshots(path, 4)).play(script)
    last = load_snapshot(path)
    assert (last.version, last.center.tolist()) == (6, server.center.tolist())
    rule = Additive(0.5)
    rule.load(last.state)
    reply = torch.zeros(8, dtype=torch.float64)
    rule.apply(last.center.clone(), torch.zeros(8, dtype=torch.float64), 0.0, reply)
    assert reply[0] == pytest.approx(float(last.center[0]) + 0.5 * 1.96875)


def test_a_file_that_is_no_snapshot_is_named(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    for name in ("junk", "nothing"):
        with pytest.raises(CheckpointError, match=f"{name} is no snapshot"):
            load_snapshot(tmp_path / name)
    with pytest.raises(ConfigError, match="every = 0"):
        Snapshots(tmp_path / "x", 0)


def test_momentum_spares_the_buffers() -> None:
    rule, center, reply = Additive(0.5, num_trained=1), torch.zeros(2), torch.zeros(2)
    for _ in range(2):
        rule.apply(center, torch.ones(2), 0.0, reply)
    assert reply.tolist() == [2.5, 2.0]
    with pytest.raises(ConfigError, match="momentum = 1"):
        Additive(1.0)


def test_alpha_follows_workers_that_join_later() -> None:
    """beta / 2 for two that were expected, beta / 3 from the answer on that tells of a third."""

    def script(bench: Bench) -> None:
        model = torch.nn.Linear(1, 1, bias=False).double()
        packed = Packed(model)
        center = ShardedCenter(bench.store, packed.flat, run_id=RUN, worker=0, timeout_s=DEADLINE_S)
        rate = ElasticRate(beta=0.9)
        method = ServedEasgd(packed, center, rate, lambda: LR, num_workers=2, tau=1)
        others = [bench.link(worker) for worker in (1, 2)]
        others[0].join()
        alphas, workers = [], []
        for turn in range(3):
            if turn == 1:
                others[1].join()
            method.sync_now(LR)
            alphas.append(method._alpha)
            workers.append(method.metrics().num_workers)
        assert alphas == [0.45, 0.45, 0.3]
        assert workers == [2, 3, 3]
        others[1].leave()
        method.close()
        others[0].leave()

    numel = Packed(torch.nn.Linear(1, 1, bias=False).double()).numel
    Bench(numel=numel).play(script)


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [
        (ElasticRate(beta=0.9), [0.3, 0.3, 0.45, 0.45, 0.9, 0.9]),
        (ElasticRate(alpha=0.3), [0.3] * 6),
        (ElasticRate(rho=2.0), [2.0 * LR] * 6),
        (ElasticRate(beta=1.5, unsafe=True), [0.5, 0.5, 0.75, 0.75, 0.75, 0.75]),
    ],
    ids=["beta", "alpha", "rho", "no further than is stable"],
)
def test_alpha_follows_workers_that_leave(rate: ElasticRate, wanted: list[float]) -> None:
    """From the answer on that no longer counts them; one says goodbye, the other is cut off."""

    def script(bench: Bench) -> None:
        packed = Packed(torch.nn.Linear(1, 1, bias=False).double())
        center = ShardedCenter(bench.store, packed.flat, run_id=RUN, worker=0, timeout_s=DEADLINE_S)
        others = [bench.link(worker) for worker in (1, 2)]
        for other in others:
            other.join()
        method = ServedEasgd(packed, center, rate, lambda: LR, num_workers=3, tau=1)
        alphas = []
        for turn in range(6):
            if turn == 1:
                others[0].leave()
                bench.await_members(2)
            if turn == 3:
                others[1]._client.disconnect()
                bench.await_members(1)
            method.sync_now(LR)
            alphas.append(method._alpha)
        assert alphas == pytest.approx(wanted)
        assert method.metrics().num_workers == 3  # all that were asked for
        method.close()

    numel = Packed(torch.nn.Linear(1, 1, bias=False).double()).numel
    Bench(numel=numel, num_workers=3).play(script)


def test_a_replay_counts_departures_where_they_were() -> None:
    """The workers of the replay leave at another time, and alpha changes at the same exchange."""

    def play(order: Order, leaves_at: int | None) -> tuple[list[float], list[OrderEntry]]:
        alphas: list[float] = []

        def script(bench: Bench) -> None:
            packed = Packed(torch.nn.Linear(1, 1, bias=False).double())
            center = ShardedCenter(
                bench.store, packed.flat, run_id=RUN, worker=0, timeout_s=DEADLINE_S
            )
            other = bench.link(1)
            other.join()
            rate = ElasticRate(beta=0.9)
            method = ServedEasgd(packed, center, rate, lambda: LR, num_workers=2, tau=1)
            for turn in range(5):
                if turn == leaves_at:
                    other.leave()
                    bench.await_members(1)
                method.begin_pass()
                center.look()  # is in no record, and must not matter
                method.after_step(LR)
                alphas.append(method._alpha)
            method.close()
            if leaves_at is None:
                other.leave()

        numel = Packed(torch.nn.Linear(1, 1, bias=False).double()).numel
        bench = Bench(numel=numel, num_workers=2, order=order, is_recording=True)
        record = bench.play(script).books.record
        return alphas, list(record or [])

    alphas, record = play(FIRST_COME, 2)
    assert alphas == pytest.approx([0.45, 0.45, 0.45, 0.9, 0.9])
    assert OrderEntry(LEAVE, 1) in record
    for leaves_at in (0, 4, None):
        assert play(record, leaves_at) == (alphas, record)
