"""One rank of `ganglion profile`: everything that is measured on it, in order."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ganglion.cli.environment import cores_per_rank
from ganglion.decide.costs import Timing
from ganglion.decide.topology import Launch, Mesh, read_launch
from ganglion.execute.comm import World, open_world, this_host, torch_world
from ganglion.execute.device import pick_device
from ganglion.execute.measure import (
    Pairs,
    ProductTime,
    ProfileSizes,
    TierRates,
    Watch,
    keep_freed_memory,
    overlap_share,
    time_messages,
    time_products,
    time_rings,
    time_tiers,
)
from ganglion.execute.train import time_engine, time_models

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """What one rank measured; times of messages and collectives are the same on all."""

    device: str
    num_threads: int
    num_nodes: int
    ranks_per_node: int
    memory_bytes: int
    products: list[ProductTime]
    timings: list[Timing]
    links: dict[str, list[Timing]]
    carrier: str
    hidden_share: float  # of a collective behind computation
    tiers: list[TierRates]


def profile_ranks(sizes: ProfileSizes, folder: str) -> RankProfile:
    """Measure as one of the ranks that a launcher started; `folder` is that of the disk tier."""
    logging.getLogger("ganglion").setLevel(logging.ERROR)  # tiers warn of what is measured here
    launch = read_launch(os.environ)
    num_threads = cores_per_rank(launch.local_num_ranks)
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    world = open_world(launch, Mesh(data=launch.num_ranks), timeout_s=_TIMEOUT_S)
    found = _measure(world, launch, sizes, Path(folder), num_threads)
    world.barrier()
    world.close()
    return found


def _measure(
    world: World, launch: Launch, sizes: ProfileSizes, folder: Path, num_threads: int
) -> RankProfile:
    watch = Watch(pick_device(launch.local_rank), sizes.budget_s)
    hosts = [int(host) for host in world.gather_numbers([float(_host_number())])[:, 0]]
    per_node = max(hosts.count(host) for host in hosts)
    products = _products(world, watch, sizes, num_threads)
    timings = time_models(world, watch, sizes)
    links: dict[str, list[Timing]] = {}
    hidden_share = 1.0
    if world.num_ranks > 1:
        everyone = world.group("data")
        hidden_share = overlap_share(world, watch, everyone, sizes.ring_bytes[-1])
        timings += time_engine(_opened(launch), world.num_ranks, watch, sizes.num_steps)
        links = _links(world, launch, watch, sizes, hosts)
    return RankProfile(
        device=watch.device.type,
        num_threads=num_threads,
        num_nodes=len(set(hosts)),
        ranks_per_node=per_node,
        memory_bytes=_memory_bytes(watch.device, per_node),
        products=products,
        timings=timings,
        links=links,
        carrier=world.carrier,
        hidden_share=hidden_share,
        tiers=time_tiers(world, watch, folder, sizes.tier_bytes),
    )


def _products(
    world: World, watch: Watch, sizes: ProfileSizes, num_threads: int
) -> list[ProductTime]:
    threads = [2**power for power in range(num_threads.bit_length()) if 2**power < num_threads]
    found = []
    for number in (*threads, num_threads) if watch.device.type == "cpu" else (num_threads,):
        found += time_products(world, watch, sizes.products, precision="fp32", num_threads=number)
    return found + time_products(
        world, watch, sizes.half_products, precision="bf16", num_threads=num_threads
    )


def _links(
    world: World, launch: Launch, watch: Watch, sizes: ProfileSizes, hosts: list[int]
) -> dict[str, list[Timing]]:
    """Return the times of messages and collectives, inside nodes and between them."""
    found: dict[str, list[Timing]] = {}
    for pairs in _pairs(hosts):
        found[pairs.link] = time_messages(world, watch, pairs, sizes.message_bytes, watch.budget_s)
    per_node = max(hosts.count(host) for host in hosts)
    for size in (n for n in range(2, world.num_ranks + 1) if world.num_ranks % n == 0):
        link = "intra" if per_node % size == 0 else "inter"
        if size & (size - 1) and size != world.num_ranks:
            continue  # powers of two and the whole are enough
        grouped = _opened(launch)(Mesh(x=size, data=world.num_ranks // size))
        group = grouped.group("x")
        found.setdefault(link, []).extend(
            time_rings(grouped, watch, group, link, sizes.ring_bytes, watch.budget_s)
        )
        grouped.close()
    return found


def _pairs(hosts: list[int]) -> list[Pairs]:
    """Return neighbours inside nodes, and ranks at the same place of neighbouring nodes."""
    nodes = [[r for r, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]
    inside = [pair for ranks in nodes for pair in zip(ranks[0::2], ranks[1::2], strict=False)]
    between = [
        pair
        for first, second in zip(nodes[0::2], nodes[1::2], strict=False)
        for pair in zip(first, second, strict=False)
    ]
    found = {"intra": inside, "inter": between}
    return [Pairs(link, tuple(pairs)) for link, pairs in found.items() if pairs]


def _opened(launch: Launch) -> Callable[[Mesh], World]:
    """Return what opens another world of the same ranks."""
    return lambda mesh: torch_world(launch.rank, mesh, _TIMEOUT_S)


def _host_number() -> int:
    return zlib.crc32(this_host().encode())


def _memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Return the memory of a rank: of its device, or its share of the machine's."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return int(psutil.virtual_memory().total) // ranks_per_node
