"""A plan on a cluster: which ranks are simulated, and which links their messages take.

Ranks of a node that send to other nodes at the same time share its adapter: one port per node. A
simulated rank may stand for others (replicas that are all alike, the ranks of a tensor group); then
its messages count for theirs too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from ganglion.decide.costs import (
    Cluster,
    Ring,
    StageTimes,
    injection_limit,
    link_between,
    ring_of,
)
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import (
    BUILT_IN,
    Registry,
    ScheduleOptions,
    canonical_schedule,
    planned_options,
    planned_schedule,
    planned_stage_map,
)
from ganglion.decide.simulator.options import Disturbance, Route, SimulationOptions, Transfer
from ganglion.decide.simulator.pipeline import num_simulated, simulate
from ganglion.decide.simulator.result import Simulation
from ganglion.decide.topology import Coordinates


def with_default_limit(
    name: str,
    options: ScheduleOptions,
    times: Sequence[StageTimes],
    num_microbatches: int,
) -> ScheduleOptions:
    """Return the options with the limit that links and jitter need, if message_driven has none."""
    if canonical_schedule(name, "schedule") != "message_driven" or options.limit is not None:
        return options
    return replace(options, limit=injection_limit(times, num_microbatches))


def with_known_costs(plan: Plan, times: Sequence[StageTimes]) -> Plan:
    """Return the plan with the limit that the costs of its stages need, unless it was chosen."""
    if canonical_schedule(plan.schedule) != "message_driven" or plan.limit:
        return plan
    return replace(plan, limit=injection_limit(times, plan.num_microbatches))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSimulation:
    """A simulation of a plan."""

    simulation: Simulation
    plan: Plan
    options: ScheduleOptions

    def global_rank(self, sim_rank: int) -> int:
        """Return the rank of the plan that a simulated rank is."""
        return global_rank(self.plan, sim_rank)


def global_rank(plan: Plan, sim_rank: int) -> int:
    """Return the rank of the plan that a simulated rank is: the first of its tensor group."""
    replica, pipe = divmod(sim_rank, plan.pipe)
    return plan.mesh().rank(Coordinates(data=replica, pipe=pipe))


def simulate_plan(
    plan: Plan,
    times: Sequence[StageTimes],
    cluster: Cluster,
    *,
    num_steps: int,
    disturbances: tuple[Disturbance, ...] = (),
    seed: int = 0,
    schedules: Registry = BUILT_IN,
) -> PlanSimulation:
    """Run some steps of a plan on a cluster; `times` has one entry for each pipe coordinate.

    A limit that the plan leaves open is derived from these times.
    """
    plan = with_known_costs(plan, times)
    stage_map = planned_stage_map(plan, schedules)
    chunk_times = [
        times[stage_map.rank_of(stage)].divided(stage_map.num_chunks)
        for stage in range(stage_map.num_stages)
    ]
    num_replicas = num_simulated(times, plan.data, disturbances)
    network = ClusterNetwork(plan, cluster, chunk_times, num_replicas, schedules)
    blocked_s: tuple[float, ...] = ()
    if not cluster.runtime.overlaps_reduction:
        blocked_s = tuple(one.reduce_s + one.update_s for one in chunk_times)
        chunk_times = [replace(one, reduce_s=0.0, update_s=0.0) for one in chunk_times]
    simulation = simulate(
        lambda rank: planned_schedule(plan, rank, schedules),
        chunk_times,
        [plan.num_microbatches] * num_steps,
        SimulationOptions(
            num_replicas=plan.data,
            network=network,
            disturbances=disturbances,
            seed=seed,
            blocked_s=blocked_s,
        ),
    )
    options = planned_options(plan, schedules)
    return PlanSimulation(simulation=simulation, plan=plan, options=options)


class ClusterNetwork:
    """The links of a cluster as the simulated ranks of a plan use them."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        times: Sequence[StageTimes],
        num_replicas: int,
        schedules: Registry = BUILT_IN,
    ) -> None:
        """Serve `num_replicas` simulated replicas; `times` has one entry for each stage."""
        self._plan = plan
        self._mesh = plan.mesh()
        self._cluster = cluster
        self._times = times
        self._num_replicas = num_replicas
        self._stage_map = planned_stage_map(plan, schedules)
        self._routes: dict[tuple[int, int], Route] = {}
        self._reductions: dict[int, tuple[Transfer, ...]] = {}
        given = cluster.stages is not None and cluster.stages.reduce_s is not None
        self._fixed = given or not cluster.runtime.overlaps_reduction

    def route(self, source: int, target: int) -> Route:
        """Return the route of a message between two simulated ranks."""
        if (source, target) not in self._routes:
            self._routes[source, target] = self._find_route(source, target)
        return self._routes[source, target]

    def reduction(self, stage: int) -> tuple[Transfer, ...]:
        """Return what the all-reduce of a stage moves on each adapter, or on a link of its own.

        Nothing if the times of the stage contain it, or there is only one replica.
        """
        if stage not in self._reductions:
            self._reductions[stage] = self._find_reduction(stage)
        return self._reductions[stage]

    def _find_reduction(self, stage: int) -> tuple[Transfer, ...]:
        pipe = self._stage_map.rank_of(stage)
        first = global_rank(self._plan, pipe)
        if self._fixed or self._plan.data == 1 or not self._times[stage].gradient_bytes:
            return ()
        ring = ring_of(self._mesh, "data", self._cluster, first)
        parts = 2 * (ring.num_ranks - 1)
        num_bytes = parts / ring.num_ranks * self._times[stage].gradient_bytes
        latency_s = ring.call_s + parts * ring.latency_s
        return tuple(
            Transfer(Route(port, rate, latency_s, num_alike), num_bytes)
            for port, rate, num_alike in self._ring_ports(stage, first, ring)
        )

    def _find_route(self, source: int, target: int) -> Route:
        sender, receiver = (global_rank(self._plan, sim_rank) for sim_rank in (source, target))
        if not self._cluster.runtime.overlaps_messages:  # the times of stages contain them
            return Route(None, math.inf, 0.0)
        link = link_between(self._cluster, sender, receiver)
        node = self._cluster.node_of(sender)
        if not link.shared or node == self._cluster.node_of(receiver):
            return Route((sender, receiver), link.bytes_per_s, link.latency_s)
        alike = self._num_alike(node, source % self._plan.pipe, target % self._plan.pipe)
        return Route(("adapter", node), link.bytes_per_s, link.latency_s, alike)

    def _num_alike(self, node: int, pipe: int, target_pipe: int) -> float:
        """Return how many ranks of a node each simulated one stands for when it sends."""
        leaving = simulated = 0
        first = node * self._cluster.ranks_per_node
        for rank in range(first, min(first + self._cluster.ranks_per_node, self._mesh.num_ranks)):
            at = self._mesh.coordinates(rank)
            if at.pipe != pipe:
                continue
            there = Coordinates(data=at.data, pipe=target_pipe, x=at.x, y=at.y, z=at.z)
            if self._cluster.node_of(self._mesh.rank(there)) != node:
                leaving += 1
                simulated += at.data < self._num_replicas and not (at.x or at.y or at.z)
        return leaving / max(1, simulated)

    def _ring_ports(
        self, stage: int, first: int, ring: Ring
    ) -> list[tuple[Hashable, float, float]]:
        """Return the ports of a ring, with their rates and the number of rings that share them."""
        group = self._mesh.group_of(first, ("data",))
        nodes = sorted({self._cluster.node_of(rank) for rank in group})
        link = self._cluster.inter
        if len(nodes) == 1 or link is None or not link.shared or link.collective_gbps is not None:
            return [(("ring", stage), ring.bytes_per_s, 1.0)]
        if self._num_replicas == 1:  # all nodes are like the first
            nodes = nodes[:1]
        num_alike = float(self._plan.x * self._plan.y * self._plan.z)
        return [(("adapter", node), link.bytes_per_s, num_alike) for node in nodes]
