"""Processes that only serve centres, here as threads: found through a store, told all they need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ganglion.decide.topology import Launch, Mesh
from ganglion.errors import ConfigError, LayoutError, PeerLost
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.options import AveragingOptions
from ganglion.execute.averaging.served.local_server import async_method
from ganglion.execute.averaging.served.server import ServerMetrics
from ganglion.execute.averaging.served.server_process import ServerProcess, announce_end
from ganglion.execute.averaging.workers import own_address, server_place
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    LR,
    Weights,
    assert_near,
    copies,
    make_model,
    plain_sgd,
    train_threads,
)

DEADLINE_S = 20.0


class Servers:
    """Threads in the place of server processes."""

    def __init__(self, number: int, **options: Any) -> None:
        self.store = dist.HashStore()
        self.seen: dict[int, list[ServerMetrics]] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(shard, options), daemon=True)
            for shard in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, shard: int, options: dict[str, Any]) -> None:
        process = ServerProcess(self.store, shard, DEADLINE_S)
        self.seen[shard] = process.serve(**options)

    def join(self) -> dict[int, list[ServerMetrics]]:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return self.seen


class Worker:
    """One worker of a served method, and its loop."""

    def __init__(
        self, world: World, wanted: AveragingOptions, store: Any, model: nn.Module
    ) -> None:
        self.rank, self.model, self.world = world.rank, model, world
        self.optimizer = plain_sgd(model.parameters())
        self.packed = Packed(model)
        group = world.group("data", use="averaging")
        self.method, self.host = async_method(
            wanted, self.packed, group, lambda: LR, DEADLINE_S, store
        )
        world.barrier()
        if world.rank == 0:
            announce_end(store)

    def train(self, steps: range) -> None:
        from tests.support.averages import batch, loss_of

        for step in steps:
            self.method.begin_pass()
            x, y = batch(self.rank, step)
            loss_of(self.model(x), y).backward()
            self.method.before_step(LR)
            self.optimizer.step()
            self.method.after_step(LR)
            self.optimizer.zero_grad()

    def center(self) -> Weights:
        views = self.packed.views(self.method.center())
        return {name: view.clone() for name, view in views.items()}


def run(
    num_workers: int,
    num_servers: int,
    body: Callable[[Worker], Any],
    *,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> tuple[list[Any], dict[int, list[ServerMetrics]]]:
    servers = Servers(num_servers, **(options or {}))
    wanted = AveragingOptions(servers=num_servers, **given)

    def worker(world: World) -> Any:
        made = Worker(world, wanted, servers.store, make_model(seed=world.rank))
        result = body(made)
        made.method.close()
        return result

    found = run_threads(Mesh(data=num_workers), worker)
    return found, servers.join()


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("listen_on", [None, "127.0.0.1"])
def test_servers_do_what_a_thread_of_a_worker_does(num_servers: int, listen_on: str | None) -> None:
    """Round robin has one order, so every number is the same."""

    def body(worker: Worker) -> tuple[Weights, Weights]:
        worker.train(range(6))
        worker.world.barrier()
        return copies(worker.model), worker.center()

    options = {"listen_on": listen_on}
    found, seen = run(2, num_servers, body, options=options, mode="round_robin", beta=0.8, tau=2)
    wanted = train_threads(2, 6, mode="round_robin", beta=0.8, tau=2)
    for (weights, center), trained in zip(found, wanted, strict=True):
        assert_near(weights, trained.weights)
        assert_near(center, found[0][1])
    assert_near(found[0][1], wanted[1].center)
    assert sorted(seen) == list(range(num_servers))
    for (metrics,) in seen.values():
        assert metrics.version == 6
        assert metrics.lost == {}


def test_all_begin_at_the_weights_of_the_first_worker() -> None:
    found, _ = run(3, 2, lambda worker: copies(worker.model), mode="async", beta=0.9)
    first = copies(make_model(seed=0))
    for weights in found:
        assert_near(weights, first)


@pytest.mark.parametrize("given", [{"mode": "async", "beta": 0.9}, {"mode": "async_sgd", "tau": 1}])
def test_workers_learn(given: dict[str, Any]) -> None:
    from tests.single.averaging.test_averaging_modes import loss_at

    def body(worker: Worker) -> Weights:
        worker.train(range(60))
        worker.world.barrier()
        return worker.center()

    found, seen = run(3, 2, body, **given)
    assert loss_at(found[0]) < 0.6 * loss_at(copies(make_model()))
    assert all(metrics.version > 0 for (metrics,) in seen.values())


def test_a_restored_centre_forgets_its_speed() -> None:
    """With momentum at the centre, an update after a restore moves it by itself alone."""

    def body(worker: Worker) -> list[Weights]:
        worker.train(range(3))
        start = torch.zeros_like(worker.packed.gather())
        worker.host.restore(start)
        worker.method.load_state_dict({"center": start, "step": 3})
        worker.packed.gather().copy_(start)
        worker.packed.scatter()
        before = worker.center()
        with torch.no_grad():
            worker.packed.gather().add_(2.0)
        worker.method.sync_now(LR)
        return [before, worker.center()]

    ((before, after),), _ = run(1, 2, body, mode="async_sgd", tau=1, center_momentum=0.9)
    for name, tensor in before.items():
        assert torch.equal(tensor, torch.zeros_like(tensor))
        assert_near({name: after[name]}, {name: torch.full_like(tensor, 2.0)})


def test_one_server_may_hold_several_centres() -> None:
    servers = Servers(1)
    wanted = AveragingOptions(mode="async", beta=0.9, tau=1, servers=1)

    def body(world: World) -> list[Tensor]:
        models = [nn.Linear(2 + i, 3).double() for i in range(3)]
        for i, model in enumerate(models):
            for parameter in model.parameters():
                nn.init.constant_(parameter, float(i))
        methods = []
        for i, model in enumerate(models):
            group = world.group("data", use=f"averaging {i}")
            packed = Packed(model)
            method, _ = async_method(wanted, packed, group, lambda: LR, DEADLINE_S, servers.store)
            methods.append(method)
        world.barrier()
        if world.rank == 0:
            announce_end(servers.store)
        found = [method.center() for method in methods]
        for method in methods:
            method.close()
        return found

    for centers in run_threads(Mesh(data=2), body):
        for i, center in enumerate(centers):
            assert set(center.tolist()) <= {0.0, float(i)}  # 0: padding
            assert float(i) in center.tolist()
    assert len(servers.join()[0]) == 3


def test_a_server_that_is_started_again_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    options = {"snapshots": folder, "every": 1}

    def body(worker: Worker) -> Weights:
        worker.train(range(4))
        worker.world.barrier()
        return worker.center()

    servers = Servers(1, **options)
    wanted = AveragingOptions(mode="async", beta=0.9, tau=1, servers=1)

    def train(world: World) -> Weights:
        worker = Worker(world, wanted, servers.store, make_model())
        center = body(worker)
        worker.method.close()
        return center

    (center, _) = run_threads(Mesh(data=2), train)
    ((first,),) = servers.join().values()
    assert first.version == 8
    again = ServerProcess(servers.store, 0, DEADLINE_S)
    announcement = again._hear(0)
    assert announcement is not None
    server = again._open(announcement, None, folder, 1)
    server._listener.close()
    assert server.books.version == 8
    views = Packed(make_model()).views(server.center)
    assert_near(dict(views), center)


def test_a_server_that_nobody_tells_anything_gives_up() -> None:
    with pytest.raises(PeerLost, match=r"shard 1 waited 0.2 s for workers to announce"):
        ServerProcess(dist.HashStore(), 1, 0.2).serve()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"beta": 0.9, "servers": 1}, 'servers = 1 has no meaning with mode = "sync"'),
        ({"mode": "hogwild", "beta": 0.9, "servers": 2}, 'no meaning with mode = "hogwild"'),
        ({"mode": "async", "beta": 0.9, "servers": -1}, "servers = -1: give 0 or more"),
        ({"mode": "async", "beta": 0.9, "servers": 2, "center": "sharded:3"}, "leave center out"),
        ({"mode": "async", "beta": 0.9, "servers": 1, "inner": 2}, "inner = 2 do not go together"),
        ({"mode": "async", "beta": 0.9, "servers": 1, "deterministic": True}, "deterministic do"),
    ],
)
def test_servers_that_make_no_sense_are_refused(given: dict[str, Any], text: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=text):
        ElasticAverage(model, plain_sgd(model.parameters()), **given)


def test_the_last_processes_serve() -> None:
    launches = [Launch(rank=rank, num_ranks=5) for rank in range(5)]
    assert [server_place(launch, 2) for launch in launches] == [None, None, None, 0, 1]
    with pytest.raises(LayoutError, match=r"servers = 5 of the 5 processes .* leave no worker"):
        server_place(launches[0], 5)
    with pytest.raises(ConfigError, match="mpiexec does not give"):
        server_place(Launch(num_ranks=3, launcher="mpiexec"), 1)


def test_the_address_is_the_one_towards_the_meeting_place() -> None:
    near = Launch(num_ranks=2, local_num_ranks=2, master_addr="127.0.0.1", master_port=9)
    far = Launch(num_ranks=4, local_num_ranks=2, master_addr="127.0.0.1", master_port=9)
    assert own_address(near) is None
    assert own_address(far) == "127.0.0.1"


def test_a_worker_does_not_serve() -> None:
    model = make_model()
    average = ElasticAverage(model, plain_sgd(model.parameters()), mode="async", beta=0.9)
    assert not average.is_server
    with pytest.raises(ConfigError, match="this process is a worker"):
        average.serve()
    average.close()
