"""Joining the parts of a pipeline rank: stages, versions, gradients, optimizers, engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn

from ganglion.decide.config import check_flushes
from ganglion.decide.costs import segments
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import (
    ListedSchedule,
    RankSchedule,
    planned_options,
    planned_schedule,
)
from ganglion.decide.topology import TENSOR_AXES, Coordinates
from ganglion.errors import ConfigError
from ganglion.execute.comm import Transport, World
from ganglion.execute.device import peak_bytes
from ganglion.execute.gradients import GradientBuckets
from ganglion.execute.models import named_buffers
from ganglion.execute.pipeline.blocks import Stage, StageSettings, defer_weight_gradients
from ganglion.execute.pipeline.context import BuildContext, LocalModel
from ganglion.execute.pipeline.cutting import Stages, cut_model, serial_names
from ganglion.execute.pipeline.engine import Agreement, Engine
from ganglion.execute.pipeline.pipeline_executor import PipelineExecutor, StageAt
from ganglion.execute.pipeline.stage_worker import StagePart, StageWorker, Tie
from ganglion.execute.pipeline.tensor_split import (
    Splitting,
    choose_kept,
    is_split,
    make_blocks_real,
    share_pieces,
)
from ganglion.execute.update import BatchEnd, ErrorFeedback, RateSetter, StepNumbers, WeightVersions


def build_pipeline(context: BuildContext, splitting: Splitting, rate: RateSetter) -> LocalModel:
    """Build the pipeline rank of this process; all ranks do so at the same time.

    Reductions always overlap: the schedule says when they begin.
    """
    plan, world = context.plan, context.world
    schedule = planned_schedule(plan, world.coordinates.pipe, context.schedules)
    if plan.schedule == "stash" and context.max_grad_norm > 0:
        raise ConfigError(
            f"optimizer.max_grad_norm = {context.max_grad_norm} needs the gradients of all stages "
            f'at one moment, which parallel.schedule = "stash" never has: set it to 0'
        )
    check_flushes(plan, schedule)
    cut = cut_model(context.blocks, plan, schedule.stage_map, context.costs)
    agrees = is_split(world.mesh) and not isinstance(schedule, ListedSchedule)
    axes = ("pipe", *TENSOR_AXES) if is_split(world.mesh) else ("pipe",)
    has_mail = plan.pipe > 1 or agrees
    transport = world.open_transport(*axes, trace=context.recorder) if has_mail else None
    rank_at = _rank_at(world, schedule)
    stages = schedule.stage_map.stages_of(world.coordinates.pipe)
    block_names = tuple(name for number in stages for name in cut.stages[number])
    make_blocks_real(context, splitting, block_names)
    parts: dict[int, StagePart] = {}
    for number in stages:
        parts[number] = _part(number, context, schedule, cut, rank_at, splitting, parts.values())
    choose_kept(context, splitting, block_names)
    _average(parts, context, cut)
    # Replicas meet in reductions only; what fails in one must reach the others before.
    has_siblings = plan.pipe > 1 and plan.data > 1
    siblings = world.open_transport("data") if has_siblings else None
    executor = _executor(
        context, schedule, parts, (transport, siblings), rank_at, rate, splitting, agrees
    )
    return LocalModel(
        executor=executor,
        parameters={name: p for part in parts.values() for name, p in part.parameters.items()},
        updates=[part.update for part in parts.values()],
        feedback=_feedback(parts.values()) if context.error_feedback else None,
        block_names=block_names,
        plan=_as_decided(context, cut),
    )


def _average(parts: Mapping[int, StagePart], context: BuildContext, cut: Stages) -> None:
    """Let the stages of this rank be averaged with those of other workers, if the plan says so."""
    for position, (number, part) in enumerate(parts.items()):
        buffers = named_buffers({name: context.blocks[name] for name in cut.stages[number]})
        tensors = {**part.parameters, **buffers}
        part.averaged = context.average(tensors, part.update.optimizers, position)


def _as_decided(context: BuildContext, cut: Stages) -> Plan:
    """Return the plan with what it left open: a resumed run cuts at the same places."""
    limit = planned_options(context.plan, context.schedules).limit or 0
    return dataclasses.replace(context.plan, stage_boundaries=cut.boundaries, limit=limit)


def _rank_at(world: World, schedule: RankSchedule) -> Callable[[int], int]:
    at, stage_map = world.coordinates, schedule.stage_map
    pipes = map(stage_map.rank_of, range(stage_map.num_stages))
    places = (Coordinates(data=at.data, pipe=pipe, x=at.x, y=at.y, z=at.z) for pipe in pipes)
    ranks = [world.mesh.rank(place) for place in places]  # found once: every message asks
    return ranks.__getitem__


def _part(
    number: int,
    context: BuildContext,
    schedule: RankSchedule,
    cut: Stages,
    rank_at: Callable[[int], int],
    splitting: Splitting,
    earlier: Iterable[StagePart],
) -> StagePart:
    """Build a stage; a parameter that an earlier stage of this rank has belongs to that one."""
    blocks = [context.blocks[name] for name in cut.stages[number]]
    taken = {name for part in earlier for name in part.parameters}
    named = serial_names(context.blocks, cut.stages[number])
    parameters = {name: p for name, p in named.items() if name not in taken}
    stored = context.updates.store(blocks, parameters)
    trainable = stored.trainable
    num_kept = _versions_kept(context, schedule)
    versions = WeightVersions(trainable, num_kept) if num_kept > 1 and trainable else None
    if versions is None:  # versions have memory of their own
        share_pieces(context, splitting, parameters, wholly=False)
    num_sets = max(1, num_kept)
    buckets = GradientBuckets(
        trainable,
        splitting.reach,
        context.recorder,
        bucket_bytes=context.bucket_bytes,
        num_sets=num_sets,
    )
    feedback = ErrorFeedback(versions) if versions and context.error_feedback else None
    return StagePart(
        stage=Stage(
            number,
            blocks,
            cut.first_block(number),
            _settings(number, context, schedule, cut, blocks),
        ),
        parameters=parameters,
        buckets=buckets,
        update=context.updates.make(stored, buckets, versions, feedback),
        versions=versions,
        feedback=feedback,
        ties=_ties(number, cut, parameters, rank_at),
        num_sets=num_sets,
    )


def _feedback(parts: Iterable[StagePart]) -> dict[str, Tensor]:
    """Return what error feedback remembers in all stages of this rank."""
    return {n: t for p in parts if p.feedback is not None for n, t in p.feedback.previous.items()}


def _versions_kept(context: BuildContext, schedule: RankSchedule) -> int:
    """Return how many versions a stage needs room for; the bound may depend on the batch."""
    probe = planned_schedule(context.plan, schedule.rank, context.schedules)
    probe.admit(context.plan.num_microbatches)
    return probe.version_bound if schedule.flushes else max(2, probe.version_bound)


def _settings(
    number: int,
    context: BuildContext,
    schedule: RankSchedule,
    cut: Stages,
    blocks: Sequence[nn.Module],
) -> StageSettings:
    last = schedule.stage_map.num_stages - 1
    plan, stream = context.plan, context.stream

    def seed_block(microbatch: int, block: int) -> None:
        step, place = divmod(microbatch, plan.num_microbatches)
        stream.seed_block(step, place, block)

    return StageSettings(
        loss_fn=context.loss_fn if number == last else None,
        loss_scale=1.0 / (plan.num_microbatches * plan.num_summed_shares),
        num_stages=last + 1,
        seed_block=seed_block,
        autocast=context.autocast,
        segments=segments(plan, cut.span(number), len(context.blocks)),
        offload=context.activations,
        deferral=defer_weight_gradients(blocks) if schedule.splits_backward else None,
        dynamic_scale=lambda number: context.policy.scale_of(number // plan.num_microbatches),
        call=context.call,
    )


def _ties(
    number: int, cut: Stages, parameters: Mapping[str, nn.Parameter], rank_at: Callable[[int], int]
) -> tuple[Tie, ...]:
    ties: list[Tie] = []
    for name in sorted(parameters):
        holders = cut.holders.get(name, ())
        if len(holders) > 2:
            raise ConfigError(
                f"parameter {name!r} is shared by {len(holders)} stages {list(holders)}, but "
                f"gradients are exchanged between two: use fewer stages"
            )
        for other in holders:
            if other != number and rank_at(other) != rank_at(number):
                partner = rank_at(other)
                shared = sum(tie.partner == partner for tie in ties)
                ties.append(Tie(name, partner, shared, is_first=number < other))
    return tuple(ties)


def _lag(plan: Plan) -> int:
    """Return how many batches enter before the first is back, so that no forward misses its turn.

    The first stage wants microbatch k + pipe once microbatch k is back.
    """
    return (plan.num_microbatches - 1 + plan.pipe) // plan.num_microbatches


def _agreement(world: World, transport: Transport | None) -> Agreement:
    """Return what lets the ranks of a tensor group do the same in the same order."""
    assert transport is not None, "orders need a transport"
    return Agreement(transport, world.mesh.group_of(world.rank, TENSOR_AXES), world.rank)


def _executor(
    context: BuildContext,
    schedule: RankSchedule,
    parts: Mapping[int, StagePart],
    transports: tuple[Transport | None, Transport | None],
    rank_at: Callable[[int], int],
    rate: RateSetter,
    splitting: Splitting,
    agrees: bool,
) -> PipelineExecutor:
    transport, siblings = transports
    world = context.world
    end = BatchEnd(context.policy, rate.set)

    def own_numbers() -> tuple[float, float]:
        return float(executor.stop_requested), float(peak_bytes(context.device))

    stage_map = schedule.stage_map
    last = StageAt(stage_map.num_stages - 1, stage_map.rank_of(stage_map.num_stages - 1))
    numbers = StepNumbers(
        context.world,
        own_numbers,
        loss_pipe=last.pipe,
        by_replica=context.plan.averages,
        among=context.among,
    )
    worker = StageWorker(parts, numbers, transport, end, splitting.weights)
    engine = Engine(
        schedule,
        transport,
        rank_at,
        worker,
        context.recorder,
        context.timeout_s,
        siblings=siblings,
        agreement=_agreement(world, transport) if agrees else None,
        in_turn=is_split(world.mesh),
    )
    lag = 0 if schedule.flushes else _lag(context.plan)
    executor = PipelineExecutor(
        *(context, engine, worker, parts, numbers, end),
        lag=lag,
        last=last,
        whole_output=splitting.whole_output,
    )
    return executor
