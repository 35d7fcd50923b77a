"""Collectives between threads: the right results, in a fixed order, and no hang when one fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.errors import PeerLost, ProtocolError
from ganglion.execute.comm import MAX, World, run_threads
from ganglion.execute.comm.local.group import LocalHub


def test_all_reduce_over_every_axis() -> None:
    mesh = Mesh(data=2, x=2, z=2)

    def body(world: World) -> dict[str, float]:
        results = {}
        for axes in (["data"], ["x"], ["z"], ["data", "x"], ["data", "x", "z"]):
            tensor = torch.tensor([float(world.rank)])
            world.group(*axes).all_reduce(tensor).wait()
            results["+".join(axes)] = tensor.item()
        return results

    for rank, results in enumerate(run_threads(mesh, body)):
        for axes, value in results.items():
            assert value == sum(mesh.group_of(rank, axes.split("+")))


def test_the_other_collectives() -> None:
    def body(world: World) -> tuple[list[float], list[float], list[float], list[float]]:
        group = world.group("data")
        mine = torch.arange(4.0) + 10 * world.rank
        gathered, part, peak = torch.empty(12), torch.empty(2), mine.clone()
        group.all_gather(gathered, mine).wait()
        group.reduce_scatter(part, torch.arange(6.0) * (world.rank + 1)).wait()
        group.all_reduce(peak, MAX).wait()
        group.broadcast(mine, root=2).wait()
        group.barrier()
        return gathered.tolist(), part.tolist(), peak.tolist(), mine.tolist()

    for rank, (gathered, part, peak, mine) in enumerate(run_threads(Mesh(data=3), body)):
        assert gathered == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
        assert part == [6.0 * (2 * rank), 6.0 * (2 * rank + 1)]
        assert peak == mine == [20, 21, 22, 23]


def test_many_started_before_the_first_wait() -> None:
    def body(world: World) -> list[float]:
        tensors = [torch.full((2,), float(i + world.rank)) for i in range(20)]
        handles = [world.group("data").all_reduce(tensor) for tensor in tensors]
        for handle in reversed(handles):
            handle.wait()
        return [tensor[0].item() for tensor in tensors]

    for results in run_threads(Mesh(data=2), body):
        assert results == [2 * i + 1 for i in range(20)]


def test_reduction_order_does_not_depend_on_arrival() -> None:
    """Floating-point sums depend on order; results must not depend on who comes last."""

    def results(late: int) -> list[float]:
        gate = threading.Event()

        def body(world: World) -> float:
            tensor = torch.tensor([[1e8, 1.0, -1e8][world.rank]])
            if world.rank == late:
                gate.wait(5)
            handle = world.group("data").all_reduce(tensor)
            if world.rank == (late + 1) % 3:
                gate.set()
            handle.wait()
            return tensor.item()

        return run_threads(Mesh(data=3), body)

    assert results(0) == results(1) == results(2)


def test_a_failing_rank_is_reported_and_nobody_hangs() -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            raise ValueError("broken on purpose")
        world.group("data").all_reduce(torch.zeros(1)).wait()

    with pytest.raises(ValueError, match="broken on purpose"):
        run_threads(Mesh(data=3), body)


def test_a_silent_rank_is_named() -> None:
    def body(world: World) -> None:
        if world.rank == 0:
            world.group("data").all_reduce(torch.zeros(1)).wait()

    with pytest.raises(PeerLost, match=r"all_reduce\(sum\) of ranks \[0, 1\] lacks ranks \[1\]"):
        run_threads(Mesh(data=2), body, timeout_s=0.2)


@pytest.mark.parametrize("kind", ["size", "call"])
def test_disagreeing_ranks_are_told_so(kind: str) -> None:
    def body(world: World) -> None:
        group = world.group("data")
        if kind == "size":
            group.all_reduce(torch.zeros(world.rank + 1)).wait()
        elif world.rank:
            group.broadcast(torch.zeros(1)).wait()
        else:
            group.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(ProtocolError, match="ranks called different collectives"):
        run_threads(Mesh(data=2), body)


def test_world_numbers_and_text() -> None:
    def body(world: World) -> tuple[list[list[float]], str, str]:
        table = world.gather_numbers([float(world.rank), 0.5])
        return (
            table.tolist(),
            world.broadcast_text(f"text of {world.rank}"),
            world.broadcast_text(""),
        )

    for table, text, empty in run_threads(Mesh(data=2), body):
        assert table == [[0.0, 0.5], [1.0, 0.5]]
        assert (text, empty) == ("text of 0", "")


def test_a_group_asked_for_after_a_failure_fails_at_once() -> None:
    hub = LocalHub(Mesh(data=2), timeout_s=30)
    failed = threading.Event()

    def fail() -> None:
        hub.fail(0, "rank 0 failed with ValueError: broken on purpose")
        failed.set()

    thread = threading.Thread(target=fail)
    thread.start()
    assert failed.wait(30)
    handle = hub.world(1).group("data").all_reduce(torch.zeros(1))
    with pytest.raises(PeerLost, match=r"lacks ranks \[0\]: rank 0 failed with ValueError"):
        handle.wait()
    thread.join()


def test_a_handle_tells_when_its_collective_was_done() -> None:
    def body(world: World) -> tuple[float | None, float]:
        handle = world.group("data").all_reduce(torch.zeros(1))
        world.barrier()
        after_s = time.perf_counter()
        handle.wait()
        return handle.finished_s, after_s

    for finished_s, after_s in run_threads(Mesh(data=2), body):
        assert finished_s is not None
        assert finished_s <= after_s
