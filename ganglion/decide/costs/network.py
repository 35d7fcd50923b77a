"""The network model: a message costs latency + bytes / bandwidth, a collective is many of them.

A ring of w ranks cuts a buffer into w parts and passes them on; every rank sends in each step:

    reduce-scatter   w - 1 steps      all-gather   w - 1 steps      all-reduce   both

So an all-reduce of n bytes takes 2 (w-1) latency + 2 (w-1)/w n / bandwidth: Thakur, Rabenseifner
and Gropp 2005; its bandwidth part is the communication cost of 2006.09503, A.1.1. Over a tree it
takes 2 log2(w) latency + 2 n / bandwidth, which is less for small buffers; the faster one counts.

Software may take a time for each collective beyond its steps (`collective_s` of the link).

A ring is as slow as its slowest link. Its speed depends on other rings (2502.08145, section V-B):
P rings through the same node divide its bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ganglion.decide.costs.cluster import BYTES_PER_GBIT, Cluster, Link
from ganglion.decide.topology import Mesh

# Groups along an axis that are looked at where they do not all lie alike on the nodes.
_MOST_GROUPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A group of ranks that take part in a collective, and the slowest link between them."""

    num_ranks: int
    latency_s: float
    bytes_per_s: float
    call_s: float = 0.0  # what a collective takes beyond its steps


def link_between(cluster: Cluster, first: int, second: int) -> Link:
    """Return the link between two ranks: inside a node, or between nodes."""
    return _link(cluster, crosses=cluster.node_of(first) != cluster.node_of(second))


def transfer_s(num_bytes: float, link: Link, num_senders: int = 1) -> float:
    """Return the time of one message while `num_senders` ranks of the node send at once."""
    share = num_senders if link.shared else 1
    return link.latency_s + num_bytes * share / link.bytes_per_s


def all_reduce_s(num_bytes: float, ring: Ring) -> float:
    """Return the time to add up a buffer of `num_bytes` that each rank holds."""
    if ring.num_ranks == 1:
        return 0.0
    hops = 2 * math.ceil(math.log2(ring.num_ranks))
    tree_s = hops * ring.latency_s + 2 * num_bytes / ring.bytes_per_s
    return ring.call_s + min(tree_s, 2 * _steps_s(num_bytes, ring))


def reduce_scatter_s(num_bytes: float, ring: Ring) -> float:
    """Return the time to add up a buffer of `num_bytes` and leave each rank its part."""
    return ring.call_s + _steps_s(num_bytes, ring) if ring.num_ranks > 1 else 0.0


def all_gather_s(num_bytes: float, ring: Ring) -> float:
    """Return the time to collect on each rank a buffer of `num_bytes` from its parts."""
    return reduce_scatter_s(num_bytes, ring)


def _steps_s(num_bytes: float, ring: Ring) -> float:
    steps = ring.num_ranks - 1
    return steps * (ring.latency_s + num_bytes / ring.num_ranks / ring.bytes_per_s)


def ring_of(mesh: Mesh, axis: str, cluster: Cluster, rank: int) -> Ring:
    """Return the ring of a rank's group along an axis, with all other groups at work too."""
    line = _Line.along(mesh, axis)
    if line.size == 1:
        return Ring(num_ranks=1, latency_s=0.0, bytes_per_s=math.inf)
    first, last = line.ends(rank)
    nodes = {cluster.node_of(first), cluster.node_of(last)}
    link = _link(cluster, crosses=len(nodes) > 1)
    if axis == "data" and link.bucket_gbps is not None:
        link = replace(link, collective_gbps=link.bucket_gbps)
    rates = []
    for node in nodes:
        ranks = range(node * cluster.ranks_per_node, (node + 1) * cluster.ranks_per_node)
        num_rings = line.num_rings(ranks, mesh.num_ranks, crossing=len(nodes) > 1)
        rates.append(_rate(link, cluster, line.num_members(rank, ranks), num_rings))
    return Ring(
        num_ranks=line.size,
        latency_s=link.step_s,
        bytes_per_s=min(rates),
        call_s=link.collective_s,
    )


def slowest_ring(mesh: Mesh, axis: str, cluster: Cluster, pipe: int) -> Ring:
    """Return the slowest ring along an axis among the ranks of a pipe coordinate."""
    rings = [ring_of(mesh, axis, cluster, rank) for rank in _bases(mesh, axis, cluster, pipe)]
    return max(rings, key=lambda ring: (ring.latency_s, 1 / ring.bytes_per_s))


@dataclass(frozen=True, slots=True)
class _Line:
    """The groups along one axis: `size` ranks each, `stride` apart."""

    stride: int
    size: int

    @classmethod
    def along(cls, mesh: Mesh, axis: str) -> _Line:
        inner = mesh.rank_order[: mesh.rank_order.index(axis)]
        return cls(math.prod(mesh.size(one) for one in inner), mesh.size(axis))

    def ends(self, rank: int) -> tuple[int, int]:
        """Return the first and the last rank of a rank's group."""
        digit = rank // self.stride % self.size
        first = rank - digit * self.stride
        return first, first + (self.size - 1) * self.stride

    def num_members(self, rank: int, among: range) -> int:
        """Return how many ranks of a rank's group are among some consecutive ones."""
        first, _ = self.ends(rank)
        low = max(0, -(-(among.start - first) // self.stride))
        high = min(self.size - 1, (among.stop - 1 - first) // self.stride)
        return max(0, high - low + 1)

    def num_rings(self, among: range, num_ranks: int, *, crossing: bool) -> int:
        """Return how many groups have members among some ranks, and others outside or not."""
        shares = 0.0
        for rank in range(among.start, min(among.stop, num_ranks)):
            members = self.num_members(rank, among)
            if (members < self.size) == crossing:
                shares += 1 / members
        return round(shares)


def _bases(mesh: Mesh, axis: str, cluster: Cluster, pipe: int) -> Iterator[int]:
    """Yield a rank of each kind of group along an axis, at one pipe coordinate."""
    node, line = cluster.ranks_per_node, _Line.along(mesh, axis)
    whole = line.stride * line.size
    alike = (node % line.stride == 0 or line.stride % node == 0) and (
        node % whole == 0 or whole % node == 0
    )
    pipes, found = _Line.along(mesh, "pipe"), 0
    rank = pipe * pipes.stride
    while rank < mesh.num_ranks and found < (1 if alike else _MOST_GROUPS):
        if rank // pipes.stride % pipes.size == pipe and rank // line.stride % line.size == 0:
            found += 1
            yield rank
        rank += 1


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
