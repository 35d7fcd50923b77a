"""The schedules of a plan: from its fields to the state machines of its ranks, and what these hold.

The engine, the simulator and the checks before a launch all use these functions, so that they agree
on every option, including those that a plan leaves open.

What a rank holds at most is found by walking through a listed schedule, stage by stage:

    1F 2F 1F 2B ...      stage 1: 2 alive, stage 2: 1 alive, at the same time

Of a schedule without a fixed order only its bound is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline.action import BACKWARD, FORWARD, WEIGHT
from ganglion.decide.schedules.pipeline.laws import rehearse
from ganglion.decide.schedules.pipeline.listed import ListedSchedule
from ganglion.decide.schedules.pipeline.registry import BUILT_IN, Registry, ScheduleOptions
from ganglion.decide.schedules.pipeline.schedule import RankSchedule, StageMap
from ganglion.errors import ConfigError, LayoutError

# Microbatches per stage that message_driven admits where the costs of links and jitter are unknown.
# With the paper's one per stage, ranks idle as soon as messages take time (specs: 70.5 s instead of
# 58.5 s for 4 stages, 16 microbatches and a latency of a quarter forward); two lose nothing there.
UNKNOWN_COST_LIMIT = 2


def planned_options(plan: Plan, schedules: Registry = BUILT_IN) -> ScheduleOptions:
    """Return the options of a plan; raise ConfigError for those that its schedule does not take.

    A limit left open is UNKNOWN_COST_LIMIT microbatches per stage, at most those of a batch. Where
    costs are known, `costs.injection_limit` is better; write it into the plan.
    """
    _refuse_unused(plan, schedules)
    limit = plan.limit or None
    if limit is None and schedules.canonical(plan.schedule) == "message_driven":
        limit = min(UNKNOWN_COST_LIMIT * plan.pipe, plan.num_microbatches)
    return ScheduleOptions(
        limit=limit,
        extra=plan.extra or None,
        chunks=plan.chunks or None,
        priority=plan.priority or None,
    )


def planned_schedule(plan: Plan, rank: int, schedules: Registry = BUILT_IN) -> RankSchedule:
    """Return the schedule of one pipe coordinate of a plan."""
    options = planned_options(plan, schedules)
    return schedules.make(plan.schedule, rank, plan.pipe, options, key="parallel.schedule")


def planned_stage_map(plan: Plan, schedules: Registry = BUILT_IN) -> StageMap:
    """Return which stages each pipe coordinate of a plan holds."""
    return planned_schedule(plan, 0, schedules).stage_map


def check_planned(plan: Plan, schedules: Registry = BUILT_IN) -> None:
    """Raise if a plan's schedule cannot run its batches, or its stage boundaries are too few.

    A schedule of the user's own is rehearsed: it must obey the laws before ranks run it.
    """
    try:
        if schedules.canonical(plan.schedule) not in BUILT_IN.makers:
            rehearse(
                lambda rank: planned_schedule(plan, rank, schedules),
                plan.pipe,
                (plan.num_microbatches,) * 3,
                f"parallel.schedule = {plan.schedule!r}",
            )
        first = planned_schedule(plan, 0, schedules)
        _check_cuts(plan, first.stage_map)
        first.admit(plan.num_microbatches)
    except LayoutError as error:
        raise LayoutError(f"{_keys(plan)}: {error}") from error


def _refuse_unused(plan: Plan, schedules: Registry) -> None:
    known = schedules.options_of(plan.schedule)
    for option in ("limit", "extra", "chunks", "priority"):
        value = getattr(plan, option)
        if value and option not in known:
            has = f"has only {', '.join(known)}" if known else "has no options"
            raise ConfigError(
                f"parallel.{option} = {value!r} means nothing to parallel.schedule = "
                f"{plan.schedule!r}, which {has}: remove parallel.{option}"
            )


def _check_cuts(plan: Plan, stage_map: StageMap) -> None:
    cuts, needed = len(plan.stage_boundaries), stage_map.num_stages - 1
    if cuts and cuts != needed:
        raise LayoutError(
            f"parallel.stage_boundaries has {cuts} cuts, but {stage_map.num_ranks} ranks with "
            f"{stage_map.num_chunks} stages each need {needed}: write {needed}, or [] to balance"
        )


def _keys(plan: Plan) -> str:
    """Return the settings that a schedule was made from, for an error message."""
    named = {"schedule": plan.schedule, "pipe": plan.pipe}
    options = {key: getattr(plan, key) for key in ("limit", "extra", "chunks", "priority")}
    chosen = {key: value for key, value in options.items() if value}
    return ", ".join(f"parallel.{key} = {value!r}" for key, value in {**named, **chosen}.items())


Alive = tuple[int, ...]  # microbatches of each stage of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one pipe coordinate holds; no entry of `alive` is exceeded by another in every stage.

    `num_stages` counts the stages of the whole model. There is a set of gradients per version.
    """

    stages: tuple[int, ...]
    num_stages: int
    alive: tuple[Alive, ...]
    num_versions: int

    def most_alive(self, stage: int) -> int:
        """Return the most microbatches that one of the stages has alive."""
        index = self.stages.index(stage)
        return max(moment[index] for moment in self.alive)


def planned_holding(plan: Plan, rank: int, schedules: Registry = BUILT_IN) -> Holding:
    """Return what one pipe coordinate of a plan holds."""
    schedule = planned_schedule(plan, rank, schedules)
    if plan.pipe == 1 and schedule.flushes:  # plain training: one microbatch after the other
        return Holding(stages=(0,), num_stages=1, alive=((1,),), num_versions=1)
    schedule.admit(plan.num_microbatches)  # some bounds depend on the batch
    kept = schedule.version_bound
    if isinstance(schedule, ListedSchedule):
        moments = _walked(schedule, plan.num_microbatches)
    else:
        moments = _bounded(schedule, plan.num_microbatches)
    return Holding(
        stages=schedule.stage_map.stages_of(rank),
        num_stages=schedule.stage_map.num_stages,
        alive=_worst(moments),
        num_versions=kept if schedule.flushes else max(2, kept),
    )


def _walked(schedule: ListedSchedule, num_microbatches: int) -> Iterator[Alive]:
    """Yield the microbatches alive after each forward of the list."""
    stages = schedule.stage_map.stages_of(schedule.rank)
    alive = dict.fromkeys(stages, 0)
    last = WEIGHT if schedule.splits_backward else BACKWARD
    for kind, stage, _ in schedule._list(num_microbatches):
        if kind == FORWARD:
            alive[stage] += 1
            yield tuple(alive.values())
        elif kind == last:
            alive[stage] -= 1


def _bounded(schedule: RankSchedule, num_microbatches: int) -> Iterator[Alive]:
    """Yield for each stage the case that as much of the bound as possible is on that stage."""
    stages = schedule.stage_map.stages_of(schedule.rank)
    bound = schedule.live_bound
    most = num_microbatches if schedule.flushes or bound is None else bound
    for first in range(len(stages)):
        left = most * len(stages) if bound is None else bound
        alive = [0] * len(stages)
        for place in (first, *(other for other in range(len(stages)) if other != first)):
            alive[place] = min(most, left)
            left -= alive[place]
        yield tuple(alive)


def _worst(moments: Iterable[Alive]) -> tuple[Alive, ...]:
    """Return the moments that no other exceeds in every stage."""
    found = set(moments)
    return tuple(sorted(one for one in found if not any(_exceeds(two, one) for two in found)))


def _exceeds(one: Alive, other: Alive) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
