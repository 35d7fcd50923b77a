"""How ranks choose their way: shared memory, torch between hosts, and what happens without memory.

Hosts are pretended: a name given to the meeting decides who shares memory with whom.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError
from ganglion.execute.comm import MAX, World, run_threads, torch_world
from ganglion.execute.comm.hosts import HostMap, choose_transport, this_host
from tests.support.harness import RankFailed, Ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def collectives(world: World) -> dict[str, list[float]]:
    """Run every collective over several axes, dtypes and sizes; integers, so sums are exact."""
    found: dict[str, list[float]] = {}
    for axes in (("data",), ("x",), ("data", "x")):
        group = world.group(*axes)
        for dtype in DTYPES:
            for size in (0, 1, 7, 40_000):
                name = f"{'+'.join(axes)} {dtype} {size}"
                found |= {f"{name} {k}": v for k, v in _each(world, group, dtype, size).items()}
        group.barrier()
    return found


def _each(world: World, group, dtype: torch.dtype, size: int) -> dict[str, list[float]]:
    mine = ((torch.arange(size * group.size) + world.rank) % 11).to(dtype)
    total, peak, to_one, text = (mine[:size].clone() for _ in range(4))
    gathered = torch.empty(size * group.size, dtype=dtype)
    part = torch.empty(size, dtype=dtype)
    last = group.size - 1
    handles = [
        group.all_reduce(total),
        group.all_reduce(peak, MAX),
        group.all_gather(gathered, mine[:size].clone()),
        group.reduce_scatter(part, mine),
        group.broadcast(text, root=last),
        group.reduce(to_one, root=last),
    ]
    for handle in handles:
        handle.wait()
    shown = {"sum": total, "max": peak, "all": gathered, "part": part, "root": text, "one": to_one}
    return {key: tensor.double().tolist()[:9] for key, tensor in shown.items()}


def on_hosts(world: World, mesh: Mesh, hosts: str, transport: str) -> tuple[dict, list[str]]:
    other = torch_world(
        world.rank, mesh, timeout_s=30.0, transport=transport, host=hosts[world.rank]
    )
    kinds = [type(other.group(axis)).__name__ for axis in ("data", "x") if mesh.size(axis) > 1]
    found = collectives(other)
    other.close()
    return found, kinds


@pytest.mark.parametrize(
    ("mesh", "hosts", "transport", "kinds"),
    [
        (Mesh(data=2, x=2), "aaaa", "auto", ["ShmGroup", "ShmGroup"]),
        (Mesh(data=2, x=2), "aabb", "auto", ["TorchGroup", "ShmGroup"]),
        (Mesh(data=4), "aabb", "auto", ["SpanningGroup"]),
        (Mesh(data=4), "abba", "auto", ["SpanningGroup"]),
        (Mesh(data=4), "aaab", "auto", ["SpanningGroup"]),
        (Mesh(data=4), "abcd", "auto", ["WorldGroup"]),
        (Mesh(data=4), "aaaa", "torch", ["WorldGroup"]),
        (Mesh(data=4), "aaaa", "shm", ["ShmGroup"]),
    ],
    ids=str,
)
def test_every_way_gives_what_threads_give(
    ranks: Ranks, mesh: Mesh, hosts: str, transport: str, kinds: list[str]
) -> None:
    wanted = run_threads(mesh, collectives)
    for rank, (found, used) in enumerate(ranks.run(4, on_hosts, mesh, hosts, transport)):
        assert used == kinds
        assert found == wanted[rank]


def kind_of_transport(world: World, hosts: str, transport: str) -> str:
    other = torch_world(world.rank, world.mesh, 30.0, transport=transport, host=hosts[world.rank])
    opened = other.open_transport("data")
    opened.close()
    other.close()
    return type(opened).__name__


@pytest.mark.parametrize(
    ("hosts", "transport", "kind"),
    [("aa", "auto", "Shm"), ("ab", "auto", "Torch"), ("aa", "torch", "Torch")],
)
def test_messages_take_the_way_that_was_asked_for(
    ranks: Ranks, hosts: str, transport: str, kind: str
) -> None:
    found = ranks.run(2, kind_of_transport, hosts, transport)
    assert found == [f"{kind}Transport"] * 2


def repeated_sums(world: World, hosts: str) -> list[bytes]:
    other = torch_world(world.rank, Mesh(data=4), timeout_s=30.0, host=hosts[world.rank])
    generator = torch.Generator().manual_seed(world.rank)
    mine = torch.randn(100_003, generator=generator)
    sums = []
    for _ in range(5):
        total = mine.clone()
        other.group("data").all_reduce(total).wait()
        sums.append(total.numpy().tobytes())
    other.close()
    return sums


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_sums_are_repeatable_and_the_same_on_every_rank(ranks: Ranks, hosts: str) -> None:
    results = ranks.run(4, repeated_sums, hosts)
    assert len({total for sums in results for total in sums}) == 1


def without_shared_memory(world: World) -> tuple[str, list[str], float]:
    real = os.memfd_create

    def full(name: str, flags: int = 0) -> int:
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        os.memfd_create = full
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other = torch_world(world.rank, Mesh(data=2), timeout_s=30.0)
            group = other.group("data")
            tensor = torch.ones(100_000)
            group.all_reduce(tensor).wait()
    finally:
        os.memfd_create = real
    other.close()
    return type(group).__name__, [str(one.message) for one in caught], float(tensor[0])


def test_without_shared_memory_torch_takes_over_and_says_so(ranks: Ranks) -> None:
    for kind, messages, value in ranks.run(2, without_shared_memory):
        assert kind == "WorldGroup" and value == 2.0
        assert any("torch.distributed" in message for message in messages)


def many_groups(world: World) -> tuple[int, int]:
    """Make and close a group a hundred times; return the open files before and after."""
    other = torch_world(world.rank, Mesh(data=2), timeout_s=30.0)
    other.group("data").barrier()
    other.close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(100):
        again = torch_world(world.rank, Mesh(data=2), timeout_s=30.0)
        again.group("data").all_reduce(torch.ones(50_000)).wait()
        again.close()
    return before, len(list(Path("/proc/self/fd").iterdir()))


def test_a_hundred_groups_leave_no_file_open(ranks: Ranks) -> None:
    for before, after in ranks.run(2, many_groups):
        assert after <= before


def die_while_others_wait(world: World, hosts: str) -> None:
    other = torch_world(world.rank, Mesh(data=4), timeout_s=30.0, host=hosts[world.rank])
    group = other.group("data")
    group.barrier()
    if world.rank == 3:
        os._exit(1)
    group.all_reduce(torch.zeros(200_000)).wait()


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_a_death_reaches_every_rank(hosts: str) -> None:
    with pytest.raises(RankFailed) as failed:
        Ranks().run(4, die_while_others_wait, hosts)
    text = str(failed.value)
    for rank in (0, 1, 2):
        assert f"rank {rank}:" in text
    assert text.count("errors.PeerLost") + text.count("errors.CommError") >= 3


# --- the choice itself -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "names", "has_gpu", "way"),
    [
        ("auto", "aa", False, "shm"),
        ("auto", "ab", False, "torch"),
        ("auto", "aab", False, "shm"),
        ("auto", "aa", True, "torch"),
        ("torch", "aa", False, "torch"),
        ("shm", "aa", False, "shm"),
    ],
)
def test_choice(wanted: str, names: str, has_gpu: bool, way: str) -> None:
    assert choose_transport(wanted, HostMap(tuple(names)), has_gpu=has_gpu) == way


def test_hosts_without_a_name_share_nothing() -> None:
    assert choose_transport("auto", HostMap(("", "")), has_gpu=False) == "torch"


@pytest.mark.parametrize(
    ("wanted", "names", "has_gpu", "text"),
    [
        ("shm", "ab", False, "2 hosts"),
        ("shm", "aa", True, "GPUs"),
        ("tcp", "aa", False, "is not one of"),
    ],
)
def test_impossible_choices_are_refused(wanted: str, names: str, has_gpu: bool, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        choose_transport(wanted, HostMap(tuple(names)), has_gpu=has_gpu)


def test_this_host_has_a_name_that_stays() -> None:
    assert this_host() == this_host() != ""
