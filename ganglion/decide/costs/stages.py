"""Stages: where to cut the blocks, and how long each stage of a plan then takes on a cluster.

Times are those of one rank. `microbatch_size` is that of one (data, z) coordinate, so only x and y
share the work of a microbatch, while z shares the stored weights, too. The collectives inside a
layer that x, y and z need are not in these times: see `block_times`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from ganglion.decide.costs.block_times import (
    BlockTimes,
    BlockWork,
    ComputeClock,
    message_element_bytes,
    weight_element_bytes,
)
from ganglion.decide.costs.cluster import Cluster, PerStage
from ganglion.decide.costs.network import all_reduce_s, link_between, slowest_ring, transfer_s
from ganglion.decide.costs.recompute import segments
from ganglion.decide.costs.times import StageTimes
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import BlockCost
from ganglion.decide.topology import Coordinates, Mesh
from ganglion.errors import ConfigError, LayoutError

# AdamW reads weight, gradient and two moments and writes all but the gradient, in fp32.
UPDATE_BYTES_PER_PARAMETER = 7 * 4
# Of these, two moments go to and come from a lower tier, and the masters if there are some.
MOVED_BYTES_PER_PARAMETER, MASTER_BYTES = 2 * 4, 4


def balanced_boundaries(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage but the first, such that the dearest stage is cheapest.

    Among all such cuts it takes those with the least sum of squares, the most even; no stage is
    empty.
    """
    if not 1 <= num_stages <= len(costs):
        raise LayoutError(
            f"parallel.pipe = {num_stages} stages cannot be cut from {len(costs)} blocks: use 1 "
            f"to {len(costs)} stages"
        )
    return _balanced(tuple(costs), num_stages)


@lru_cache(maxsize=64)
def _balanced(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    if num_stages == 1:
        return ()
    sums = [0.0, *accumulate(costs)]
    return _most_even(sums, num_stages, _least_maximum(sums, num_stages))


def stage_times(
    blocks: Sequence[BlockWork],
    plan: Plan,
    cluster: Cluster,
    held: Sequence[Sequence[int]] | None = None,
) -> list[StageTimes]:
    """Return the times of every pipe coordinate of a plan, from flop, bytes and speeds.

    `held` has the stages of each, for plans that cut the blocks into several a rank; its times are
    those of all of them together.
    """
    clock = _StageClock(plan, cluster, blocks)
    edges = _edges([block.cost for block in blocks], plan)
    stages = [range(a, b) for a, b in pairwise(edges)]
    if held is not None and len(stages) > plan.pipe:
        # The first stage of a rank comes last: its output is the message.
        numbers = [[n for s in reversed(mine) for n in stages[s]] for mine in held]
    else:
        numbers = [[*stage] for stage in stages]
    times = [clock.stage(mine, is_first=rank == 0) for rank, mine in enumerate(numbers)]
    return _with_network(times, plan, cluster)


def stage_times_from_file(
    cluster: Cluster, num_stages: int, plan: Plan | None = None
) -> list[StageTimes]:
    """Return the times that [stages] of a cluster file gives, with those of its links.

    Without a plan there is one rank a stage. `reduce_s` left out comes from `gradient_bytes`.
    """
    table = cluster.stages
    if table is None:
        raise ConfigError(f"{cluster.source}: cluster.stages is missing: write [stages] with times")
    plan = plan or Plan(pipe=num_stages)
    assert plan.pipe == num_stages, "a plan has as many stages as pipe coordinates"
    jitter = table.jitter
    if jitter is None:
        jitter = cluster.compute.jitter if cluster.compute else 0.0
    columns = {
        "forward_s": table.forward_s,
        "backward_s": table.backward_s,
        "weight_s": table.backward_weight_s,
        "reduce_s": table.reduce_s or 0.0,
        "update_s": table.update_s,
        "message_bytes": table.message_bytes,
        "gradient_bytes": table.gradient_bytes,
        "jitter": jitter,
    }
    spread = {name: _spread(name, value, num_stages, cluster) for name, value in columns.items()}
    rows = ({name: column[stage] for name, column in spread.items()} for stage in range(num_stages))
    times = [
        StageTimes(
            **{name: value for name, value in row.items() if not name.endswith("_bytes")},
            message_bytes=round(row["message_bytes"]),
            gradient_bytes=round(row["gradient_bytes"]),
        )
        for row in rows
    ]
    return _with_network(times, plan, cluster, keep_reduce=table.reduce_s is not None)


def _least_maximum(sums: Sequence[float], num_stages: int) -> float:
    """Return the least cost that the dearest of `num_stages` runs of blocks can have."""
    ends = range(len(sums))
    runs = sorted({sums[end] - sums[start] for end in ends for start in range(end)})
    low = bisect_left(runs, True, key=lambda most: _stages_needed(sums, most) <= num_stages)
    return runs[low]


def _stages_needed(sums: Sequence[float], most: float) -> int:
    """Return how few stages of at most `most` hold all blocks; more than exist if none do."""
    start, count = 0, 0
    while start < len(sums) - 1:
        end = start
        while end + 1 < len(sums) and sums[end + 1] - sums[start] <= most:
            end += 1
        if end == start:
            return len(sums)
        start, count = end, count + 1
    return count


def _most_even(sums: Sequence[float], num_stages: int, most: float) -> tuple[int, ...]:
    """Return the cuts with the least sum of squares among stages of at most `most`."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(num_stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (squares, cuts) in best.items():
            for end in range(start + 1, len(sums)):
                cost = sums[end] - sums[start]
                if cost > most:
                    break
                found = (squares + cost * cost, (*cuts, end))
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return best[len(sums) - 1][1][:-1]


def held_blocks(
    blocks: Sequence[BlockWork], plan: Plan, held: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the numbers of the blocks of every pipe coordinate, which holds stages `held`."""
    stages = [range(a, b) for a, b in pairwise(_edges([b.cost for b in blocks], plan))]
    if len(stages) == plan.pipe:
        return [[*stage] for stage in stages]
    return [[number for stage in mine for number in stages[stage]] for mine in held]


def _edges(blocks: Sequence[BlockCost], plan: Plan) -> list[int]:
    cuts = plan.stage_boundaries
    if not cuts:
        cuts = balanced_boundaries([block.total_flops for block in blocks], plan.pipe)
    if cuts and cuts[-1] >= len(blocks):
        raise LayoutError(
            f"parallel.stage_boundaries = {list(cuts)} cuts after the last of {len(blocks)} "
            f"blocks: the last cut must be below {len(blocks)}"
        )
    return [0, *cuts, len(blocks)]


class _StageClock:
    """Sums the times of blocks, with those that are computed again in backward."""

    def __init__(self, plan: Plan, cluster: Cluster, blocks: Sequence[BlockWork]) -> None:
        self._plan, self._cluster, self._blocks = plan, cluster, blocks
        self._compute = cluster.require_compute()
        self._clock = ComputeClock(plan, self._compute)
        self._again = computed_again(plan, len(blocks))

    def stage(self, numbers: Sequence[int], *, is_first: bool) -> StageTimes:
        plan, compute = self._plan, self._compute
        times = [self._block(number) for number in numbers]
        costs = [self._blocks[number].cost for number in numbers]
        tied = sum(cost.tied_parameters for cost in costs) if is_first else 0
        num_whole = sum(cost.num_parameters for cost in costs) - tied
        num_parameters = num_whole / (plan.x * plan.y * plan.z)
        # A block has two layers and the second swaps x and y back: its output is split over y.
        num_sent = costs[-1].output_elements / plan.y
        return StageTimes(
            forward_s=sum(one.forward_s for one in times) + compute.action_s,
            backward_s=sum(one.input_s for one in times) + compute.action_s,
            weight_s=sum(one.weight_s for one in times),
            update_s=update_s(num_parameters, plan, self._cluster),
            jitter=compute.jitter,
            message_bytes=round(num_sent * message_element_bytes(plan)),
            gradient_bytes=round(num_parameters * weight_element_bytes(plan)),
        )

    def _block(self, number: int) -> BlockTimes:
        times = self._clock.block(self._blocks[number])
        if number not in self._again:
            return times
        return replace(times, input_s=times.input_s + times.forward_s)


def update_s(num_parameters: float, plan: Plan, cluster: Cluster) -> float:
    """Return the time of an update; moves to a lower tier hide behind it, bucket by bucket.

    The first bucket comes before anything is updated, and the last one goes afterwards.
    """
    compute = cluster.require_compute()
    moving_s = num_parameters * UPDATE_BYTES_PER_PARAMETER / compute.update_bytes_per_s
    updating_s = compute.update_s + moving_s
    if plan.offload == "none":
        return updating_s
    moved = MOVED_BYTES_PER_PARAMETER + (MASTER_BYTES if plan.has_masters else 0)
    tier = cluster.require_tier(plan.offload)
    ends_s = tier.moved_s(min(num_parameters, plan.bucket_size) * moved)
    return max(updating_s, tier.moved_s(num_parameters * moved)) + ends_s


def computed_again(plan: Plan, num_blocks: int) -> frozenset[int]:
    """Return the blocks whose forward is a part of their backward, too."""
    if plan.recompute == "budget":
        raise ConfigError(
            'memory.recompute = "budget" does not name the blocks to compute again: use the plan '
            'of a run, or "full", "sqrt" or "blocks"'
        )
    return frozenset(n for span in segments(plan, range(num_blocks), num_blocks) for n in span)


def _with_network(
    times: Sequence[StageTimes], plan: Plan, cluster: Cluster, *, keep_reduce: bool = False
) -> list[StageTimes]:
    """Complete the stages with the time of their messages and of their reduction."""
    mesh = plan.mesh()
    sizes = [one.message_bytes for one in times[:-1]]
    hops = _hop_times(sizes, mesh, cluster)
    reductions = _reduce_times([one.gradient_bytes for one in times], mesh, cluster)
    return [
        replace(one, latency_s=hop_s, reduce_s=one.reduce_s if keep_reduce else reduce_s)
        for one, hop_s, reduce_s in zip(times, hops, reductions, strict=True)
    ]


def with_blocking_messages(times: Sequence[StageTimes], num_chunks: int = 1) -> list[StageTimes]:
    """Return the stages of an engine that stops for every message it sends or receives.

    Forward receives an input and sends an output, backward their gradients: four transfers of a
    microbatch in the middle of a pipeline, one after the other. Such stages move in step, so each
    stops for as long as the one with the slowest hops: T_comp + T_p2p for each microbatch, as fits
    2006.09503 as released (spec C.6). Each of `num_chunks` stages of a rank has its own messages.
    """
    hops = [0.0, *(one.latency_s for one in times[:-1]), 0.0]
    stopped_s = num_chunks * max(before + after for before, after in pairwise(hops))
    return [
        replace(
            one,
            forward_s=one.forward_s + stopped_s,
            backward_s=one.backward_s + stopped_s,
            collective_s=one.collective_s + 2 * stopped_s,
            latency_s=0.0,
        )
        for one in times
    ]


def _hop_times(sizes: Sequence[float], mesh: Mesh, cluster: Cluster) -> list[float]:
    """Return how long a message to the next stage is under way, and a gradient back from it.

    The last stage only sends gradients: it gets the time of the hop before it. All ranks of a node
    whose messages leave it send at the same time.
    """
    hops = [0.0] * mesh.pipe
    for stage in range(mesh.pipe - 1):
        sender = mesh.rank(Coordinates(pipe=stage))
        node = cluster.node_of(sender)
        ranks = range(node * cluster.ranks_per_node, (node + 1) * cluster.ranks_per_node)
        mine = [rank for rank in ranks if rank < mesh.num_ranks]
        targets = {rank: _next_stage(mesh, rank) for rank in mine}
        leaving = [r for r, to in targets.items() if to is not None and cluster.node_of(to) != node]
        for rank in mine:
            target = targets[rank]
            if target is not None and mesh.coordinates(rank).pipe == stage:
                num_senders = len(leaving) if rank in leaving else 1
                link = link_between(cluster, rank, target)
                hops[stage] = max(hops[stage], transfer_s(sizes[stage], link, num_senders))
    hops[-1] = hops[-2] if mesh.pipe > 1 else 0.0
    return hops


def _next_stage(mesh: Mesh, rank: int) -> int | None:
    """Return the rank that holds the next stage of a rank's replica; None behind the last."""
    at = mesh.coordinates(rank)
    return None if at.pipe == mesh.pipe - 1 else mesh.rank(replace(at, pipe=at.pipe + 1))


def _reduce_times(sizes: Sequence[float], mesh: Mesh, cluster: Cluster) -> list[float]:
    """Return how long the replicas of each stage take to add up their gradients."""
    rings = (slowest_ring(mesh, "data", cluster, pipe) for pipe in range(mesh.pipe))
    return [all_reduce_s(size, ring) for size, ring in zip(sizes, rings, strict=True)]


def _spread(name: str, value: PerStage, num_stages: int, cluster: Cluster) -> list[float]:
    """Return one number for each stage."""
    if not isinstance(value, tuple):
        return [value] * num_stages
    if len(value) != num_stages:
        key = {"weight_s": "backward_weight_s"}.get(name, name)
        raise LayoutError(
            f"{cluster.source}: cluster.stages.{key} has {len(value)} numbers, but there are "
            f"{num_stages} stages: write one for each, or a single number for all"
        )
    return list(value)
