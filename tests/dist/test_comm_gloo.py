"""Collectives over real processes give what the threads give, and a lost peer is an error."""

from __future__ import annotations

import os

import pytest
import torch

from ganglion.comm import MAX, World, run_threads, torch_world
from ganglion.topology import Mesh
from tests.harness import RankFailed, Ranks


def on_mesh(world: World, mesh: Mesh) -> World:
    """Return the same processes seen as another mesh."""
    return torch_world(world.rank, mesh, timeout_s=30.0)


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
    group = world.group("data")
    if world.rank == 1:
        os._exit(1)
    group.all_reduce(torch.zeros(1000)).wait()


def test_a_dead_peer_is_peer_lost() -> None:
    pool = Ranks()
    with pytest.raises(RankFailed, match=r"PeerLost: all_reduce of ranks \[0, 1\] failed"):
        pool.run(2, reduce_with_a_dead_peer)
    pool.close()
