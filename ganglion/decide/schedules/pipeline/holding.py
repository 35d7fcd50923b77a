"""What a rank of a plan holds at its worst: microbatches between forward and backward, versions.

A listed schedule is walked through, so that a rank of several stages is told apart by stage:

    1F 2F 1F 2B ...      stage 1: 2 alive, stage 2: 1 alive, at one moment

Of a schedule that decides as messages come, only its own bound is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ganglion.decide.schedules.pipeline.action import BACKWARD, FORWARD, WEIGHT
from ganglion.decide.schedules.pipeline.listed import ListedSchedule
from ganglion.decide.schedules.pipeline.planned import Planned, planned_schedule
from ganglion.decide.schedules.pipeline.registry import BUILT_IN, Registry
from ganglion.decide.schedules.pipeline.schedule import RankSchedule

Alive = tuple[int, ...]  # microbatches of each stage of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one pipe coordinate holds; `alive` has its worst moments, none of them beyond another.

    `num_stages` is that of the whole model. As many sets of gradients are held as versions.
    """

    stages: tuple[int, ...]
    num_stages: int
    alive: tuple[Alive, ...]
    num_versions: int

    def most_alive(self, stage: int) -> int:
        """Return the most microbatches that one of the stages has alive."""
        place = self.stages.index(stage)
        return max(moment[place] for moment in self.alive)


def planned_holding(plan: Planned, rank: int, schedules: Registry = BUILT_IN) -> Holding:
    """Return what one pipe coordinate of a plan holds."""
    schedule = planned_schedule(plan, rank, schedules)
    if plan.pipe == 1 and schedule.flushes:  # plain training: one microbatch after the other
        return Holding(stages=(0,), num_stages=1, alive=((1,),), num_versions=1)
    schedule.admit(plan.num_microbatches)  # some bounds depend on the batch
    kept = schedule.version_bound
    return Holding(
        stages=schedule.stage_map.stages_of(rank),
        num_stages=schedule.stage_map.num_stages,
        alive=_worst(_moments(schedule, plan.num_microbatches)),
        num_versions=kept if schedule.flushes else max(2, kept),
    )


def _moments(schedule: RankSchedule, num_microbatches: int) -> Iterable[Alive]:
    if isinstance(schedule, ListedSchedule):
        return _walked(schedule, num_microbatches)
    return _bounded(schedule, num_microbatches)


def _walked(schedule: ListedSchedule, num_microbatches: int) -> Iterator[Alive]:
    """Yield what is alive after each forward of the list."""
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
    """Yield the bound filled into one stage first, then into the others."""
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
