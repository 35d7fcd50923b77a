"""The schedules of a plan: the one way from its fields to the state machines of its ranks.

The engine, the simulator and the checks before a launch all come through here, so that they agree
on every option, those that a plan leaves open included.
"""

from __future__ import annotations

from typing import Protocol

from ganglion.decide.schedules.pipeline.laws import rehearse
from ganglion.decide.schedules.pipeline.registry import BUILT_IN, Registry, ScheduleOptions
from ganglion.decide.schedules.pipeline.schedule import RankSchedule, StageMap
from ganglion.errors import ConfigError, LayoutError

# Microbatches a stage that message_driven lets in where nobody knows what links and jitter cost.
# The paper's one a stage idles as soon as messages take time (specs: 70.5 s instead of 58.5 s for
# 4 stages, 16 microbatches and a latency of a quarter forward); two a stage lose nothing there.
UNKNOWN_COST_LIMIT = 2


class Planned(Protocol):
    """What a schedule needs to know of a plan."""

    @property
    def schedule(self) -> str:
        """Its name, an alias, or a reference to the user's own code."""

    @property
    def pipe(self) -> int:
        """The ranks of a pipeline."""

    @property
    def num_microbatches(self) -> int:
        """Those of a batch."""

    @property
    def limit(self) -> int:
        """The most microbatches in flight; 0: as `planned_options` says."""

    @property
    def extra(self) -> int:
        """What the cap of every stage is raised by."""

    @property
    def chunks(self) -> int:
        """The stages of a rank; 0: the schedule's own number."""

    @property
    def priority(self) -> str:
        """What goes first; "": the schedule's own."""

    @property
    def stage_boundaries(self) -> tuple[int, ...]:
        """The first block of each stage but the first; none: balanced."""


def planned_options(plan: Planned, schedules: Registry = BUILT_IN) -> ScheduleOptions:
    """Return the options of a plan, refusing those that its schedule has no use for.

    A limit left open is UNKNOWN_COST_LIMIT microbatches a stage, at most those of a batch. Whoever
    knows the costs writes a better one into the plan (`costs.injection_limit`).
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


def planned_schedule(plan: Planned, rank: int, schedules: Registry = BUILT_IN) -> RankSchedule:
    """Return the schedule of one pipe coordinate of a plan."""
    options = planned_options(plan, schedules)
    return schedules.make(plan.schedule, rank, plan.pipe, options, key="parallel.schedule")


def planned_stage_map(plan: Planned, schedules: Registry = BUILT_IN) -> StageMap:
    """Return which stages each pipe coordinate of a plan holds."""
    return planned_schedule(plan, 0, schedules).stage_map


def check_planned(plan: Planned, schedules: Registry = BUILT_IN) -> None:
    """Refuse a plan whose batches its schedule cannot run, or whose cuts are not as many.

    A schedule of the user's own is rehearsed: it must obey the laws before it may keep ranks busy.
    """
    try:
        if schedules.canonical(plan.schedule) not in BUILT_IN.makers:
            _rehearse(plan, schedules)
        first = planned_schedule(plan, 0, schedules)
        _check_cuts(plan, first.stage_map)
        first.admit(plan.num_microbatches)
    except LayoutError as error:
        raise LayoutError(f"{_keys(plan)}: {error}") from error


def _rehearse(plan: Planned, schedules: Registry) -> None:
    rehearse(
        lambda rank: planned_schedule(plan, rank, schedules),
        plan.pipe,
        (plan.num_microbatches,) * 3,
        f"parallel.schedule = {plan.schedule!r}",
    )


def _refuse_unused(plan: Planned, schedules: Registry) -> None:
    known = schedules.options_of(plan.schedule)
    for option in ("limit", "extra", "chunks", "priority"):
        value = getattr(plan, option)
        if value and option not in known:
            has = f"has only {', '.join(known)}" if known else "has no options"
            raise ConfigError(
                f"parallel.{option} = {value!r} means nothing to parallel.schedule = "
                f"{plan.schedule!r}, which {has}: remove parallel.{option}"
            )


def _check_cuts(plan: Planned, stage_map: StageMap) -> None:
    cuts, needed = len(plan.stage_boundaries), stage_map.num_stages - 1
    if cuts and cuts != needed:
        raise LayoutError(
            f"parallel.stage_boundaries has {cuts} cuts, but {stage_map.num_ranks} ranks with "
            f"{stage_map.num_chunks} stages each need {needed}: write {needed}, or [] to balance"
        )


def _keys(plan: Planned) -> str:
    """Name the settings that a schedule was made from."""
    named = {"schedule": plan.schedule, "pipe": plan.pipe}
    options = {key: getattr(plan, key) for key in ("limit", "extra", "chunks", "priority")}
    chosen = {key: value for key, value in options.items() if value}
    return ", ".join(f"parallel.{key} = {value!r}" for key, value in {**named, **chosen}.items())
