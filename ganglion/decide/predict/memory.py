"""The memory model: bytes of each rank of a plan, from the blocks of a model and a schedule.

    plan -> schedule -> stages of a rank, microbatches alive, weight versions
    shape -> blocks -> parameters, activations                                 -> bytes by category

All ranks of a pipe coordinate hold the same: x, y and z cut equal pieces, data holds copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.config import RunFile
from ganglion.decide.costs import (
    MIXED,
    Memory,
    RankBlocks,
    StageBlocks,
    StateRules,
    activation_memory,
    arriving_copies,
    balanced_boundaries,
    center_copies,
    gathered_blocks,
    gathered_memory,
    message_memory,
    moved_to_tier,
    segments,
    server_copies,
    state_entries,
    state_memory,
    stored_sizes,
    with_norm,
)
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.buckets import NUM_SLOTS, UpdateBucket, cut_update, kept_within
from ganglion.decide.schedules.pipeline import (
    BUILT_IN,
    Holding,
    ListedSchedule,
    canonical_schedule,
    planned_holding,
    planned_schedule,
)
from ganglion.decide.shapes import (
    Layout,
    ModelShape,
    Parameter,
    activations_of,
    blocks_of,
    parameters_of,
    sample_bytes,
)
from ganglion.units import MIB

_FLOAT = 4  # bytes
_PAGE_BYTES = 4096  # by which the room of a bucket is larger, to begin on a page


def state_rules(run: RunFile) -> StateRules:
    """Return how the optimizer of a run file keeps parameters."""
    return StateRules(
        optimizer=run.optimizer.name,
        has_momentum=run.optimizer.momentum > 0,
        error_feedback=run.optimizer.error_feedback,
    )


def predicted_memory(
    shape: ModelShape, plan: Plan, rules: StateRules, worker: int = 0
) -> list[Memory]:
    """Return the memory of a rank of each pipe coordinate at its worst.

    Stages that a plan does not cut are balanced by flop; a run that measures may cut elsewhere.
    Under elastic averaging, it is that of a `worker`; none holds more than the first.
    """
    model = _Model(shape, plan)
    return [model.rank_memory(rank, rules, worker) for rank in range(plan.pipe)]


def server_memory(shape: ModelShape, plan: Plan, rules: StateRules) -> Memory:
    """Return the memory of one server process of a plan: its part of every rank's centre."""
    ranks = predicted_memory(shape, plan, rules)
    held = sum(rank.weights for rank in ranks) * plan.x * plan.y * plan.z
    part = -(-held // plan.servers)
    return Memory(center=server_copies(plan) * part, communication=plan.data * part)


def planned_boundaries(shape: ModelShape, plan: Plan) -> tuple[int, ...]:
    """Return the first block of each stage but the first: the plan's own, or balanced by flop."""
    return tuple(start for start, _ in _Model(shape, plan).edges[1:])


def holding_of(plan: Plan, rank: int) -> Holding:
    """Return what one pipe coordinate holds.

    Of our own schedules that do not hold a whole batch, the first microbatches hold the most: of
    many, few are walked through.
    """
    name = canonical_schedule(plan.schedule)
    schedule = planned_schedule(plan, rank)
    few = 4 * schedule.stage_map.num_stages
    if few < plan.num_microbatches and name in BUILT_IN.makers:
        schedule.admit(few)
        if isinstance(schedule, ListedSchedule) and schedule.live_bound is not None:
            return planned_holding(replace(plan, num_microbatches=few), rank)
    return planned_holding(plan, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStages:
    """The blocks of one pipe coordinate, and the first block of each of its stages."""

    blocks: RankBlocks
    first_blocks: tuple[int, ...]


def planned_stages(shape: ModelShape, plan: Plan) -> list[RankStages]:
    """Return the stages of each pipe coordinate, with the costs and activations of their blocks."""
    model = _Model(shape, plan)
    return [model.rank_stages(holding) for holding in model.holdings]


class _Model:
    """The blocks of a model under a plan, cut into stages."""

    def __init__(self, shape: ModelShape, plan: Plan) -> None:
        self._cuts: dict[tuple[tuple[int, ...], tuple[bool, ...]], tuple[UpdateBucket, ...]] = {}
        self._shape = shape
        self._plan = plan
        self._mesh = plan.mesh()
        layout = Layout(
            microbatch_size=plan.microbatch_size,
            mesh=self._mesh,
            precision="fp32" if plan.compute_fp32 else plan.precision,
        )
        self._costs = blocks_of(shape, plan.microbatch_size)
        self._parameters, self._activations = parameters_of(shape), activations_of(shape, layout)
        self.holdings = [holding_of(plan, rank) for rank in range(plan.pipe)]
        num_stages = self.holdings[0].num_stages
        cuts = plan.stage_boundaries if num_stages > 1 else ()
        if not cuts:
            cuts = balanced_boundaries([block.total_flops for block in self._costs], num_stages)
        self.edges = list(pairwise([0, *cuts, len(self._costs)]))

    def rank_stages(self, holding: Holding) -> RankStages:
        flops = [block.forward_flops for block in self._costs]
        return RankStages(
            blocks=RankBlocks(
                stages=[self._stage(stage, holding) for stage in holding.stages],
                costs=[flops[slice(*self.edges[stage])] for stage in holding.stages],
                alive=holding.alive,
                offloaded=self._plan.offload_activations != "none",
            ),
            first_blocks=tuple(self.edges[stage][0] for stage in holding.stages),
        )

    def rank_memory(self, rank: int, rules: StateRules, worker: int) -> Memory:
        holding = self.holdings[rank]
        rules = replace(
            rules,
            num_versions=holding.num_versions,
            formats=MIXED if self._plan.has_masters else rules.formats,
        )
        parameters = [p for stage in holding.stages for p in self._parameters_of(holding, stage)]
        keep_bytes = int(self._plan.keep_gathered_mib * MIB)
        sizes = gathered_blocks(parameters, self._mesh, self._plan.precision)
        gathered = gathered_memory(
            parameters,
            self._mesh,
            keep_gathered=self._plan.keep_gathered or kept_within(sizes, keep_bytes),
            overlap=self._plan.overlap,
            precision=self._plan.precision,
        )
        state = state_memory(parameters, self._mesh, rules)
        if self._plan.offload != "none":
            in_flight = sum(self._bucket_bytes(holding, stage, rules) for stage in holding.stages)
            state = moved_to_tier(state, parameters, self._mesh, rules, in_flight)
        state = replace(
            state,
            center=center_copies(self._plan, worker) * state.weights,
            communication=arriving_copies(self._plan, worker) * state.weights,
        )
        return state + gathered + self._working_memory(rank, parameters)

    def _working_memory(self, rank: int, parameters: Sequence[Parameter]) -> Memory:
        holding, plan = self.holdings[rank], self._plan
        stages = [self._stage(stage, holding) for stage in holding.stages]
        offloaded = plan.offload_activations != "none"
        working = activation_memory(stages, holding.alive, offloaded=offloaded)
        flushes = planned_schedule(plan, rank).flushes
        if plan.pipe > 1 or not flushes or plan.x * plan.y * plan.z > 1:
            bucket_size = self._largest_bucket(parameters)
            working = with_norm(working, bucket_size, flushes=flushes)
        working = self._with_tied_gradient(self._with_widening(working), holding)
        num_batches = 1 if flushes else 2  # the next one enters before the last is done
        samples = Memory(communication=num_batches * plan.share_size * sample_bytes(self._shape))
        return working + message_memory(stages) + samples

    def _parameters_of(self, holding: Holding, stage: int) -> list[Parameter]:
        """Return those of a stage; one that two stages of a rank share belongs to the first."""
        blocks, has_first = self._parameters[slice(*self.edges[stage])], 0 in holding.stages
        return [p for block in blocks for p in block if not (p.is_tied and has_first)]

    def _bucket_bytes(self, holding: Holding, stage: int, rules: StateRules) -> int:
        """Return the bytes of a stage's update buckets in flight: a room for each entry.

        Three slots take turns; wide gradients have a room of their own.
        """
        parameters = self._parameters_of(holding, stage)[::-1]
        sizes = stored_sizes(parameters, self._mesh)
        entries = [state_entries(parameter, rules) for parameter in parameters]
        whole = [not (rules.optimizer == "muon" and p.in_muon) for p in parameters]
        key = (tuple(sizes), tuple(whole))
        if key not in self._cuts:  # most stages are alike
            self._cuts[key] = cut_update(sizes, whole, [0] * len(sizes), self._plan.bucket_size)
        buckets = self._cuts[key]
        slots: dict[int, set[str]] = {}
        for number, bucket in enumerate(buckets):
            used = {entry for part in bucket.slices for entry in entries[part.member]}
            slots.setdefault(number % NUM_SLOTS, set()).update(used)
        num_rooms = sum(map(len, slots.values()))
        if self._plan.has_masters:
            num_rooms += len(slots) + 1
        largest = max((bucket.num_elements for bucket in buckets), default=0)
        return num_rooms * (largest * _FLOAT + _PAGE_BYTES)

    def _stage(self, stage: int, holding: Holding) -> StageBlocks:
        start, end = self.edges[stage]
        spans = segments(self._plan, range(start, end), len(self._activations))
        return StageBlocks(
            blocks=self._activations[start:end],
            segments=[range(span.start - start, span.stop - start) for span in spans],
            is_first=stage == 0,
            is_last=stage == holding.num_stages - 1,
            num_waiting=self._num_waiting(stage, holding),
        )

    def _num_waiting(self, stage: int, holding: Holding) -> int:
        """Return how many inputs can be here that are not counted as alive."""
        if stage == 0:
            return 0
        before = next(one for one in self.holdings if stage - 1 in one.stages)
        return max(1, before.most_alive(stage - 1) - holding.most_alive(stage))

    def _largest_bucket(self, parameters: Sequence[Parameter]) -> int:
        """Return the elements of the largest bucket: full, or one parameter larger than that."""
        sizes = stored_sizes(parameters, self._mesh)
        if self._plan.has_masters:
            return sum(sizes)  # gradients in half are not in buckets
        return min(sum(sizes), max([int(self._plan.bucket_mib * MIB) // _FLOAT, *sizes]))

    def _with_tied_gradient(self, working: Memory, holding: Holding) -> Memory:
        """Return the same with room for the gradients of a weight that two blocks of a stage use.

        Autograd keeps its first gradient until it has the second, and sums them in a third place,
        when all activations are gone. Along z such gradients are counted elsewhere.
        """
        tied = [p for p in self._parameters[-1] if p.is_tied]
        if not tied or holding.num_stages > 1 or self._mesh.z > 1:
            return working
        table = sum(p.num_gathered(self._mesh) for p in tied)
        table *= MIXED.gradient if self._plan.has_masters else _FLOAT
        at_the_end = 3 * table - working.activations - working.recomputed
        return replace(working, scratch=max(working.scratch + table, at_the_end))

    def _with_widening(self, working: Memory) -> Memory:
        """Return the same with room for the fp32 weights of a block, and one wide gradient."""
        if not self._plan.compute_fp32:
            return working
        sizes = [[p.num_gathered(self._mesh) for p in block] for block in self._parameters]
        widest = max(sum(block) + max(block) for block in sizes)
        return replace(working, scratch=working.scratch + widest * _FLOAT)
