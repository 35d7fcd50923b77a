"""Plans on clusters: wires, adapters that ranks of a node share, and replicas by symmetry."""

from __future__ import annotations

import dataclasses

import pytest

from ganglion.decide.costs import Cluster, StageTimes, parse_cluster, stage_times_from_file
from ganglion.decide.plan import Plan
from ganglion.decide.simulator import Disturbance, PlanSimulation, simulate_plan
from ganglion.decide.simulator.on_cluster import ClusterNetwork, global_rank

NOTHING = Disturbance(rank=0, speed=1.0)  # disturbs nobody, but tells the replicas apart


def cluster(*, ranks_per_node: int = 4, shared: bool = True, reduce: str = "") -> Cluster:
    return parse_cluster(
        f"""
ranks_per_node = {ranks_per_node}
[links.intra]
latency_s = 0.01
bandwidth_gbps = 8e-6        # 1,000 bytes a second
[links.inter]
latency_s = 0.05
bandwidth_gbps = 4e-6        # 500
shared = {str(shared).lower()}
[stages]
forward_s = 1.0
backward_s = 2.0
message_bytes = 50
gradient_bytes = 1000
{reduce}
""",
        "test.toml",
    )


def simulated(plan: Plan, machine: Cluster, *, apart: bool = False, steps: int = 2, **times):
    found = [
        dataclasses.replace(one, **times) for one in stage_times_from_file(machine, plan.pipe, plan)
    ]
    troubles = (NOTHING,) if apart else ()
    return simulate_plan(plan, found, machine, num_steps=steps, disturbances=troubles)


PLANS = [
    Plan(data=2, pipe=2, num_microbatches=4),
    Plan(data=4, pipe=4, num_microbatches=8, schedule="two_bw"),
    Plan(data=4, pipe=2, num_microbatches=6, schedule="message_driven"),
    Plan(data=2, pipe=4, num_microbatches=4, schedule="interleaved"),
    Plan(data=8, pipe=2, num_microbatches=4, rank_order=("pipe", "x", "y", "z", "data")),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_one_replica_stands_for_all(plan: Plan, shared: bool) -> None:
    """The oracle of the symmetry: every replica simulated by itself gives the same times."""
    machine = cluster(shared=shared)
    one, all_of_them = simulated(plan, machine), simulated(plan, machine, apart=True)
    assert one.simulation.num_replicas == 1 and all_of_them.simulation.num_replicas == plan.data
    assert one.simulation.makespan_s == pytest.approx(all_of_them.simulation.makespan_s, rel=1e-9)
    assert ends(one) == pytest.approx(ends(all_of_them), rel=1e-9)


def ends(result: PlanSimulation) -> list[float]:
    return [step.end_s for step in sorted(result.simulation.steps(), key=lambda s: str(s.action))]


def test_routes_inside_a_node_and_between_nodes() -> None:
    plan = Plan(data=2, pipe=4)  # replicas of a stage sit together: node 0 has stages 0 and 1
    network = ClusterNetwork(plan, cluster(), [StageTimes(forward_s=1, backward_s=1)] * 4, 1)
    inside, between = network.route(0, 1), network.route(1, 2)
    assert (inside.bytes_per_s, inside.latency_s, inside.num_alike) == (1000, 0.01, 1)
    assert (between.bytes_per_s, between.latency_s, between.num_alike) == (500, 0.05, 2)
    assert network.route(1, 2).port != network.route(2, 1).port


def test_a_reduction_loads_the_adapter_of_every_node_that_is_simulated() -> None:
    plan = Plan(data=8, pipe=1)  # nodes 0 and 1
    times = [StageTimes(forward_s=1, backward_s=1, gradient_bytes=100)]
    for num_replicas, nodes in ((1, [0]), (8, [0, 1])):
        network = ClusterNetwork(plan, cluster(), times, num_replicas)
        ports = [transfer.route.port for transfer in network.reduction(0)]
        assert ports == [("adapter", node) for node in nodes]


def test_a_fixed_reduction_takes_the_time_of_the_file() -> None:
    plan = Plan(data=2, pipe=1)
    fixed = simulated(plan, cluster(reduce="reduce_s = 7.0"), steps=1)
    assert fixed.simulation.makespan_s == pytest.approx(1 + 2 + 7)
    ring = simulated(plan, cluster(), steps=1)  # inside a node: 1,000 bytes at 1,000 a second
    assert ring.simulation.makespan_s == pytest.approx(1 + 2 + 1.0 + 2 * 0.01)


def test_replicas_that_share_an_adapter_slow_each_other() -> None:
    """16 ranks, 8 a node: the hop between nodes carries 8 replicas at once if shared."""
    plan = Plan(data=8, pipe=2, num_microbatches=4)
    alone = simulated(plan, cluster(ranks_per_node=8, shared=False), steps=1)
    shared = simulated(plan, cluster(ranks_per_node=8, shared=True), steps=1)
    first = next(row for row in shared.simulation.messages if row[0].kind == "F")
    assert first[5] - first[4] == pytest.approx(8 * 50 / 500)
    assert shared.simulation.makespan_s > alone.simulation.makespan_s


def test_ranks_of_the_trace_are_those_of_the_plan() -> None:
    plan = Plan(data=2, pipe=2, num_microbatches=2)
    result = simulated(plan, cluster(), apart=True)
    ranks = {event.rank for event in result.simulation.events(result.global_rank)}
    assert ranks == {0, 1, 2, 3}
    assert [global_rank(plan, place) for place in range(4)] == [0, 2, 1, 3]


def test_a_thousand_ranks() -> None:
    """64 stages x 16 replicas, 256 microbatches: one replica is simulated."""
    plan = Plan(data=16, pipe=64, num_microbatches=256, schedule="two_bw")
    result = simulated(plan, cluster(ranks_per_node=8), steps=1)
    assert len(result.simulation.rows) == 64 * (2 * 256 + 2)
    assert plan.num_ranks == 1024
