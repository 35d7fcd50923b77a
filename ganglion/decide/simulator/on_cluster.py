"""A plan on a cluster: which ranks are simulated, and which wires their messages take.

Ranks of a node that leave it at the same moment share its adapter. Those that are simulated share
it by themselves (one port a node); where a rank stands for others (replicas that nothing tells
apart, the ranks of a tensor group), its messages count for theirs too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ganglion.decide.costs import Cluster, Ring, StageTimes, link_between, rings_along
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import (
    BUILT_IN,
    Registry,
    ScheduleOptions,
    planned_options,
    planned_schedule,
    planned_stage_map,
)
from ganglion.decide.simulator.defaults import with_known_costs
from ganglion.decide.simulator.disturbance import Disturbance
from ganglion.decide.simulator.links import Route, Transfer
from ganglion.decide.simulator.pipeline import Surroundings, num_simulated, simulate
from ganglion.decide.simulator.result import Simulation
from ganglion.decide.topology import Coordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSimulation:
    """A simulation of a plan, with the ranks it is about."""

    simulation: Simulation
    plan: Plan
    options: ScheduleOptions

    def global_rank(self, place: int) -> int:
        """Return the rank of the plan that a simulated rank is, or stands for."""
        return global_rank(self.plan, place)


def global_rank(plan: Plan, place: int) -> int:
    """Return the rank at a pipe coordinate of a replica, first of its tensor group."""
    replica, pipe = divmod(place, plan.pipe)
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

    A limit that the plan leaves open is what these times ask for.
    """
    plan = with_known_costs(plan, times)
    stage_map = planned_stage_map(plan, schedules)
    chunk_times = [
        times[stage_map.rank_of(stage)].divided(stage_map.num_chunks)
        for stage in range(stage_map.num_stages)
    ]
    num_replicas = num_simulated(times, plan.data, disturbances)
    network = ClusterNetwork(plan, cluster, chunk_times, num_replicas, schedules)
    simulation = simulate(
        lambda rank: planned_schedule(plan, rank, schedules),
        chunk_times,
        [plan.num_microbatches] * num_steps,
        Surroundings(num_replicas=plan.data, network=network, disturbances=disturbances, seed=seed),
    )
    options = planned_options(plan, schedules)
    return PlanSimulation(simulation=simulation, plan=plan, options=options)


class ClusterNetwork:
    """The wires of a cluster as the simulated ranks of a plan use them."""

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
        self._rings = rings_along(self._mesh, ("data",), cluster)
        self._routes: dict[tuple[int, int], Route] = {}
        self._fixed = cluster.stages is not None and cluster.stages.reduce_s is not None

    def route(self, source: int, target: int) -> Route:
        """Return the way of a message between two simulated ranks."""
        if (source, target) not in self._routes:
            self._routes[source, target] = self._find_route(source, target)
        return self._routes[source, target]

    def reduction(self, stage: int) -> tuple[Transfer, ...]:
        """Return what the all-reduce of a stage moves: a flow on each adapter, or one of its own.

        Nothing if the cluster file gives the time, or there is one replica only.
        """
        pipe = self._stage_map.rank_of(stage)
        group = self._mesh.group_of(global_rank(self._plan, pipe), ("data",))
        if self._fixed or len(group) == 1 or not self._times[stage].gradient_bytes:
            return ()
        ring = self._rings[group]
        parts = 2 * (ring.num_ranks - 1)
        num_bytes = parts / ring.num_ranks * self._times[stage].gradient_bytes
        latency_s = parts * ring.latency_s
        return tuple(
            Transfer(Route(port, rate, latency_s, num_alike), num_bytes)
            for port, rate, num_alike in self._ring_ports(stage, group, ring)
        )

    def _find_route(self, source: int, target: int) -> Route:
        sender, receiver = (global_rank(self._plan, place) for place in (source, target))
        link = link_between(self._cluster, sender, receiver)
        node = self._cluster.node_of(sender)
        if not link.shared or node == self._cluster.node_of(receiver):
            return Route((sender, receiver), link.bytes_per_s, link.latency_s)
        alike = self._num_alike(node, source % self._plan.pipe, target % self._plan.pipe)
        return Route(("adapter", node), link.bytes_per_s, link.latency_s, alike)

    def _num_alike(self, node: int, pipe: int, target_pipe: int) -> float:
        """Return how many ranks of a node each simulated one stands for on its way out."""
        leaving = simulated = 0
        for rank in range(self._mesh.num_ranks):
            at = self._mesh.coordinates(rank)
            if at.pipe != pipe or self._cluster.node_of(rank) != node:
                continue
            there = Coordinates(data=at.data, pipe=target_pipe, x=at.x, y=at.y, z=at.z)
            if self._cluster.node_of(self._mesh.rank(there)) != node:
                leaving += 1
                simulated += at.data < self._num_replicas and not (at.x or at.y or at.z)
        return leaving / max(1, simulated)

    def _ring_ports(
        self, stage: int, group: Sequence[int], ring: Ring
    ) -> list[tuple[Hashable, float, float]]:
        """Return the ports of a ring, their rates and how many rings it stands for there."""
        nodes = sorted({self._cluster.node_of(rank) for rank in group})
        link = self._cluster.inter
        if len(nodes) == 1 or link is None or not link.shared or link.collective_gbps is not None:
            return [(("ring", stage), ring.bytes_per_s, 1.0)]
        if self._num_replicas == 1:  # all nodes are like the first
            nodes = nodes[:1]
        num_alike = float(self._plan.x * self._plan.y * self._plan.z)
        return [(("adapter", node), link.bytes_per_s, num_alike) for node in nodes]
