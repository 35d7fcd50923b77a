"""The network model: a message costs latency + bytes / bandwidth, a collective is a ring of them.

A ring of w ranks cuts a buffer into w parts and passes them on; every rank sends in each step:

    reduce-scatter   w - 1 steps      all-gather   w - 1 steps      all-reduce   both

So an all-reduce of n bytes takes 2 (w-1) latency + 2 (w-1)/w n / bandwidth: Thakur, Rabenseifner
and Gropp 2005; its bandwidth part is the communication cost of 2006.09503, A.1.1. A ring is as
slow as its slowest link. Its speed depends on other rings (2502.08145, section V-B):
P rings through the same node divide its bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ganglion.decide.costs.cluster import BYTES_PER_GBIT, Cluster, Link
from ganglion.decide.topology import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A group of ranks that take part in a collective, and the slowest link between them."""

    num_ranks: int
    latency_s: float
    bytes_per_s: float


def link_between(cluster: Cluster, first: int, second: int) -> Link:
    """Return the link between two ranks: inside a node, or between nodes."""
    return _link(cluster, crosses=cluster.node_of(first) != cluster.node_of(second))


def transfer_s(num_bytes: float, link: Link, num_senders: int = 1) -> float:
    """Return the time of one message while `num_senders` ranks of the node send at once."""
    share = num_senders if link.shared else 1
    return link.latency_s + num_bytes * share / link.bytes_per_s


def all_reduce_s(num_bytes: float, ring: Ring) -> float:
    """Return the time to add up a buffer of `num_bytes` that each rank holds."""
    return reduce_scatter_s(num_bytes, ring) + all_gather_s(num_bytes, ring)


def reduce_scatter_s(num_bytes: float, ring: Ring) -> float:
    """Return the time to add up a buffer of `num_bytes` and leave each rank its part."""
    steps = ring.num_ranks - 1
    return steps * (ring.latency_s + num_bytes / ring.num_ranks / ring.bytes_per_s)


def all_gather_s(num_bytes: float, ring: Ring) -> float:
    """Return the time to collect on each rank a buffer of `num_bytes` from its parts."""
    return reduce_scatter_s(num_bytes, ring)


def rings_along(mesh: Mesh, axes: Iterable[str], cluster: Cluster) -> dict[tuple[int, ...], Ring]:
    """Return the ring of every group along some axes, all of them at work at the same time."""
    groups = mesh.groups(axes)
    members = {group: Counter(cluster.node_of(rank) for rank in group) for group in groups}
    crossing: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    for nodes in members.values():
        (crossing if len(nodes) > 1 else inside).update(nodes.keys())
    return {
        group: _ring(cluster, nodes, crossing if len(nodes) > 1 else inside)
        for group, nodes in members.items()
    }


def _ring(cluster: Cluster, members: Counter[int], num_rings: Counter[int]) -> Ring:
    num_ranks = members.total()
    if num_ranks == 1:
        return Ring(num_ranks=1, latency_s=0.0, bytes_per_s=float("inf"))
    link = _link(cluster, crosses=len(members) > 1)
    rates = (_rate(link, cluster, members[node], num_rings[node]) for node in members)
    return Ring(num_ranks=num_ranks, latency_s=link.latency_s, bytes_per_s=min(rates))


def _rate(link: Link, cluster: Cluster, num_members: int, num_rings: int) -> float:
    """Return the bytes a second of a ring with some members on a node, one ring of several.

    Only a ring through all ranks of a node is known to reach the collective rate: with fewer it
    also obeys the bandwidth of single messages.
    """
    single = link.bytes_per_s / (num_rings if link.shared else 1)
    if link.collective_gbps is None:
        return single
    collective = link.collective_gbps * BYTES_PER_GBIT
    if num_members == cluster.ranks_per_node:
        return collective
    return min(collective / num_rings, single)


def _link(cluster: Cluster, *, crosses: bool) -> Link:
    link = cluster.inter if crosses else cluster.intra
    assert link is not None, "a cluster has every link that its nodes and ranks call for"
    return link
