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
from ganglion.execute.pipeline import (
    Agreement,
    Engine,
    Stage,
    StageSettings,
    defer_weight_gradients,
)
from ganglion.execute.train.averaged import average
from ganglion.execute.train.cutting import Stages, cut_model, serial_names
from ganglion.execute.train.drifting import agreeing
from ganglion.execute.train.exchange import Exchange
from ganglion.execute.train.making_updates import make_update, store_weights
from ganglion.execute.train.parts import Held, RunRequest
from ganglion.execute.train.pipelined import PipelineExecutor, StageAt
from ganglion.execute.train.stage_worker import StagePart, StageWorker, Tie
from ganglion.execute.train.tensor_split import (
    Splitting,
    choose_kept,
    is_split,
    make_blocks_real,
    share_pieces,
)
from ganglion.execute.update import ErrorFeedback, RateSetter, WeightVersions


def assemble(request: RunRequest, splitting: Splitting, rate: RateSetter) -> Held:
    """Build the pipeline rank of this process; all ranks do so at the same time.

    Reductions always overlap: the schedule says when they begin.
    """
    plan, world = request.plan, request.world
    schedule = planned_schedule(plan, world.coordinates.pipe, request.schedules)
    if plan.schedule == "stash" and request.max_grad_norm > 0:
        raise ConfigError(
            f"optimizer.max_grad_norm = {request.max_grad_norm} needs the gradients of all stages "
            f'at one moment, which parallel.schedule = "stash" never has: set it to 0'
        )
    check_flushes(plan, schedule)
    cut = cut_model(request.blocks, plan, schedule.stage_map, request.costs)
    agrees = is_split(world.mesh) and not isinstance(schedule, ListedSchedule)
    axes = ("pipe", *TENSOR_AXES) if is_split(world.mesh) else ("pipe",)
    has_mail = plan.pipe > 1 or agrees
    transport = world.open_transport(*axes, trace=request.recorder) if has_mail else None
    rank_at = _rank_at(world, schedule)
    stages = schedule.stage_map.stages_of(world.coordinates.pipe)
    block_names = tuple(name for number in stages for name in cut.stages[number])
    make_blocks_real(request, splitting, block_names)
    parts: dict[int, StagePart] = {}
    for number in stages:
        parts[number] = _part(number, request, schedule, cut, rank_at, splitting, parts.values())
    choose_kept(request, splitting, block_names)
    _average(parts, request, cut)
    # Replicas meet in reductions only; what fails in one must reach the others before.
    has_siblings = plan.pipe > 1 and plan.data > 1
    siblings = world.open_transport("data") if has_siblings else None
    executor = _executor(
        request, schedule, parts, (transport, siblings), rank_at, rate, splitting, agrees
    )
    return Held(
        executor=executor,
        parameters={name: p for part in parts.values() for name, p in part.parameters.items()},
        updates=[part.update for part in parts.values()],
        feedback=_feedback(parts.values()) if request.error_feedback else None,
        averaged=[part.averaged for part in parts.values() if part.averaged is not None],
        block_names=block_names,
        plan=_as_decided(request, cut),
    )


def _average(parts: Mapping[int, StagePart], request: RunRequest, cut: Stages) -> None:
    """Let the stages of this rank be averaged with those of other workers, if the plan says so."""
    for position, (number, part) in enumerate(parts.items()):
        buffers = named_buffers({name: request.blocks[name] for name in cut.stages[number]})
        part.averaged = average(
            {**part.parameters, **buffers},
            part.update.optimizers,
            request.plan,
            request.world,
            request.averaging,
            position,
        )


def _as_decided(request: RunRequest, cut: Stages) -> Plan:
    """Return the plan with what it left open: a resumed run cuts at the same places."""
    limit = planned_options(request.plan, request.schedules).limit or 0
    return dataclasses.replace(request.plan, stage_boundaries=cut.boundaries, limit=limit)


def _rank_at(world: World, schedule: RankSchedule) -> Callable[[int], int]:
    at, stage_map = world.coordinates, schedule.stage_map
    pipes = map(stage_map.rank_of, range(stage_map.num_stages))
    places = (Coordinates(data=at.data, pipe=pipe, x=at.x, y=at.y, z=at.z) for pipe in pipes)
    ranks = [world.mesh.rank(place) for place in places]  # found once: every message asks
    return ranks.__getitem__


def _part(
    number: int,
    request: RunRequest,
    schedule: RankSchedule,
    cut: Stages,
    rank_at: Callable[[int], int],
    splitting: Splitting,
    earlier: Iterable[StagePart],
) -> StagePart:
    """Build a stage; a parameter that an earlier stage of this rank has belongs to that one."""
    blocks = [request.blocks[name] for name in cut.stages[number]]
    taken = {name for part in earlier for name in part.parameters}
    named = serial_names(request.blocks, cut.stages[number])
    parameters = {name: p for name, p in named.items() if name not in taken}
    stored = store_weights(request, blocks, parameters)
    trainable = stored.trainable
    num_kept = _versions_kept(request, schedule)
    versions = WeightVersions(trainable, num_kept) if num_kept > 1 and trainable else None
    if versions is None:  # versions have memory of their own
        share_pieces(request, splitting, parameters, wholly=False)
    num_sets = max(1, num_kept)
    buckets = GradientBuckets(
        trainable,
        splitting.reach,
        request.recorder,
        bucket_bytes=request.bucket_bytes,
        num_sets=num_sets,
    )
    feedback = ErrorFeedback(versions) if versions and request.error_feedback else None
    return StagePart(
        stage=Stage(
            number,
            blocks,
            cut.first_block(number),
            _settings(number, request, schedule, cut, blocks),
        ),
        parameters=parameters,
        buckets=buckets,
        update=make_update(request, stored, buckets, versions, feedback),
        versions=versions,
        feedback=feedback,
        ties=_ties(number, cut, parameters, rank_at),
        num_sets=num_sets,
    )


def _feedback(parts: Iterable[StagePart]) -> dict[str, Tensor]:
    """Return what error feedback remembers in all stages of this rank."""
    return {n: t for p in parts if p.feedback is not None for n, t in p.feedback.previous.items()}


def _versions_kept(request: RunRequest, schedule: RankSchedule) -> int:
    """Return how many versions a stage needs room for; the bound may depend on the batch."""
    probe = planned_schedule(request.plan, schedule.rank, request.schedules)
    probe.admit(request.plan.num_microbatches)
    return probe.version_bound if schedule.flushes else max(2, probe.version_bound)


def _settings(
    number: int,
    request: RunRequest,
    schedule: RankSchedule,
    cut: Stages,
    blocks: Sequence[nn.Module],
) -> StageSettings:
    last = schedule.stage_map.num_stages - 1
    plan, stream = request.plan, request.stream

    def seed_block(microbatch: int, block: int) -> None:
        step, place = divmod(microbatch, plan.num_microbatches)
        stream.seed_block(step, place, block)

    return StageSettings(
        loss_fn=request.loss_fn if number == last else None,
        loss_scale=1.0 / (plan.num_microbatches * plan.num_summed_shares),
        num_stages=last + 1,
        seed_block=seed_block,
        autocast=request.autocast,
        segments=segments(plan, cut.span(number), len(request.blocks)),
        offload=request.activations,
        deferral=defer_weight_gradients(blocks) if schedule.splits_backward else None,
        dynamic_scale=lambda number: request.judge.scale_of(number // plan.num_microbatches),
        call=request.call,
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
    request: RunRequest,
    schedule: RankSchedule,
    parts: Mapping[int, StagePart],
    transports: tuple[Transport | None, Transport | None],
    rank_at: Callable[[int], int],
    rate: RateSetter,
    splitting: Splitting,
    agrees: bool,
) -> PipelineExecutor:
    transport, siblings = transports
    world = request.world
    rates: dict[int, float] = {}

    def set_rate(step: int) -> float:
        rates[step] = rate.set(step)
        return rates[step]

    def own_numbers() -> tuple[float, float]:
        return float(executor.stop_requested), float(peak_bytes(request.device))

    stage_map = schedule.stage_map
    last = StageAt(stage_map.num_stages - 1, stage_map.rank_of(stage_map.num_stages - 1))
    exchange = Exchange(
        request.world,
        own_numbers,
        loss_pipe=last.pipe,
        by_replica=request.plan.averages,
        among=agreeing(world, request.plan),
    )
    worker = StageWorker(parts, exchange, transport, set_rate, request.judge, splitting.weights)
    engine = Engine(
        schedule,
        transport,
        rank_at,
        worker,
        request.recorder,
        request.timeout_s,
        siblings=siblings,
        agreement=_agreement(world, transport) if agrees else None,
        in_turn=is_split(world.mesh),
    )
    executor = PipelineExecutor(
        request.plan,
        request.world,
        engine,
        worker,
        parts,
        exchange,
        request.recorder,
        current_lr=lambda step: rates.pop(step),
        device=request.device,
        lag=0 if schedule.flushes else _lag(request.plan),
        last=last,
        whole_output=splitting.whole_output,
    )
    return executor
