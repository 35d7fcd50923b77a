"""Collectives over real processes give what the threads give, and a lost peer is an error."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ganglion.decide.topology import Mesh
from ganglion.errors import PeerLost, ProtocolError
from ganglion.execute.comm import MAX, Group, World, run_threads, torch_world
from ganglion.execute.comm.torch.group import new_group
from tests.support.harness import RankFailed, Ranks


def on_mesh(world: World, mesh: Mesh) -> World:
    """Return the same processes seen as another mesh."""
    return torch_world(world.rank, mesh, timeout_s=30.0, transport="torch")


def gloo(world: World) -> Group:
    """Return the group of both processes as Gloo carries it."""
    return on_mesh(world, Mesh(data=2)).group("data")


def every_collective(world: World) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {}
    for axes in (("data",), ("x",), ("data", "x")):
        group, name = world.group(*axes), "+".join(axes)
        mine = torch.arange(4.0) + 10 * world.rank
        total, peak = mine.clone(), mine.clone()
        gathered = torch.empty(4 * group.size)
        part = torch.empty(4 // group.size)
        handles = [group.all_reduce(total), group.all_reduce(peak, MAX)]
        handles += [group.all_gather(gathered, mine), group.reduce_scatter(part, mine.clone())]
        for handle in handles:
            handle.wait()
        group.broadcast(mine, root=group.size - 1).wait()
        for label, tensor in (("sum", total), ("max", peak), ("all", gathered), ("part", part)):
            results[f"{name} {label}"] = tensor.tolist()
        results[f"{name} root"] = mine.tolist()
        group.barrier()
    results["text"] = [float(len(world.broadcast_text("x" * (world.rank + 3))))]
    return results


def every_collective_on(world: World, mesh: Mesh) -> dict[str, list[float]]:
    meshed = on_mesh(world, mesh)
    results = every_collective(meshed)
    meshed.close()
    return results


@pytest.mark.parametrize("mesh", [Mesh(data=2, x=2), Mesh(data=4), Mesh(x=4)], ids=str)
def test_processes_give_what_threads_give(ranks: Ranks, mesh: Mesh) -> None:
    assert ranks.run(4, every_collective_on, mesh) == run_threads(mesh, every_collective)


def reduce_with_a_dead_peer(world: World) -> None:
    group = gloo(world)
    if world.rank == 1:
        os._exit(1)
    group.all_reduce(torch.zeros(1000)).wait()


def test_a_dead_peer_is_peer_lost() -> None:
    with pytest.raises(RankFailed, match=r"PeerLost: all_reduce of ranks \[0, 1\] failed"):
        Ranks().run(2, reduce_with_a_dead_peer)


def stamp_before_waiting(world: World) -> tuple[float, float | None, float]:
    group = gloo(world)
    start_s = time.perf_counter()
    handle = group.all_reduce(torch.zeros(1000))
    while handle.finished_s is None and time.perf_counter() < start_s + 30:
        time.sleep(0.001)
    seen_s = time.perf_counter()
    handle.wait()
    return start_s, handle.finished_s, seen_s


def test_a_handle_tells_when_its_collective_was_done(ranks: Ranks) -> None:
    """The end of a collective is known before anybody waits for it."""
    for start_s, finished_s, seen_s in ranks.run(2, stamp_before_waiting):
        assert finished_s is not None
        assert start_s <= finished_s <= seen_s


def refused_calls(world: World) -> list[str]:
    group, messages = gloo(world), []
    for call in (
        lambda: group.all_reduce(torch.zeros(3, dtype=torch.int16)),
        lambda: group.all_gather(torch.zeros(5), torch.zeros(2)),
    ):
        try:
            call().wait()
        except ProtocolError as error:
            messages.append(str(error))
    group.barrier()
    return messages


def test_a_call_that_torch_refuses_blames_the_call(ranks: Ranks) -> None:
    """No peer is lost: the group is still of use afterwards."""
    for dtype, sizes in ranks.run(2, refused_calls):
        assert "all_reduce of ranks [0, 1] cannot" in dtype
        assert "torch.int16, (3,): Invalid scalar type" in dtype
        assert "all_gather of ranks [0, 1] cannot" in sizes
        assert "torch.float32, (2,)" in sizes


def refused_calls_before_barriers(world: World) -> None:
    group = gloo(world)
    for _ in range(500):
        with pytest.raises(ProtocolError):
            group.all_reduce(torch.zeros(3, dtype=torch.int16)).wait()
        group.barrier()


def test_a_barrier_does_not_fail_with_the_error_of_a_refused_call(ranks: Ranks) -> None:
    """Gloo lists a call for a moment after its error was raised, and its barrier waits for it."""
    ranks.run(2, refused_calls_before_barriers)


def failing_starts(world: World) -> list[str]:
    """Make torch fail at the start of a call as it does when a connection is lost."""
    group, kinds = gloo(world), []
    real_reduce, real_new = dist.all_reduce, dist.new_group

    def lost(*args: object, **options: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    def alone(*args: object, **options: object) -> None:
        raise dist.DistStoreError("wait timeout after 2000ms")

    dist.all_reduce, dist.new_group = lost, alone
    try:
        for call in (
            lambda: group.all_reduce(torch.zeros(1)),
            lambda: new_group((0, 1), world.rank, timeout_s=1.0),
        ):
            try:
                call()
            except PeerLost as error:
                kinds.append(str(error).split(":")[0])
    finally:
        dist.all_reduce, dist.new_group = real_reduce, real_new
    return kinds


def test_a_connection_lost_at_the_start_is_peer_lost(ranks: Ranks) -> None:
    expected = [f"{what} of ranks [0, 1] failed" for what in ("all_reduce", "new_group")]
    assert ranks.run(2, failing_starts) == [expected, expected]
