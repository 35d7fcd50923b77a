"""A rehearsal: all ranks of a pipeline run some batches by hand, and the laws are checked.

No clock and no costs: every action takes one beat, messages none. It shows before any launch that a
schedule neither waits for ever nor breaks a law, at least in that order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ganglion.decide.schedules.pipeline.action import (
    BACKWARD,
    COMM,
    COMPUTE,
    FORWARD,
    HOST,
    Action,
    Message,
)
from ganglion.decide.schedules.pipeline.schedule import RankSchedule
from ganglion.decide.schedules.pipeline.validate import Case, LawBroken, Step, check_laws
from ganglion.errors import ConfigError, GanglionError

_LANES = (COMPUTE, COMM, HOST)


def rehearse(
    make: Callable[[int], RankSchedule], num_ranks: int, batches: Sequence[int], name: str
) -> None:
    """Refuse a schedule that breaks a law or fails; `name` is what the user calls it."""
    try:
        check_rehearsal(make, num_ranks, batches)
    except LawBroken as broken:
        raise ConfigError(
            f"{name} breaks a law of schedules with {num_ranks} ranks and {batches[0]} "
            f"microbatches: {broken}; draw it with `ganglion schedule` to see where"
        ) from broken
    except GanglionError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} failed with {num_ranks} ranks and {batches[0]} microbatches: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_rehearsal(
    make: Callable[[int], RankSchedule], num_ranks: int, batches: Sequence[int]
) -> None:
    """Run the batches and raise LawBroken, naming the action, if a law does not hold."""
    schedules = [make(rank) for rank in range(num_ranks)]
    for schedule in schedules:
        for size in batches:
            schedule.admit(size)
        schedule.stop_admitting()
    most = schedules[0].stage_map.num_stages * (3 * sum(batches) + 2 * len(batches))
    check_laws(Case.of(schedules, batches), _run(schedules, most))


def _run(schedules: Sequence[RankSchedule], most: int) -> list[Step]:
    """Beat by beat: every rank starts what it can, then everything ends and messages arrive.

    More than `most` actions are more than there are: then something runs over and over.
    """
    steps: list[Step] = []
    stage_map = schedules[0].stage_map
    beat, started = 0, _start(schedules)
    while started and len(steps) <= most:
        for rank, action, version in started:
            steps.append(Step(action, beat, beat + 1, version))
            schedules[rank].on_finish(action)
        for _, action, version in started:
            message = _message(action, version)
            if message is not None and 0 <= message.stage < stage_map.num_stages:
                schedules[stage_map.rank_of(message.stage)].on_arrival(message)
        beat, started = beat + 1, _start(schedules)
    return steps


def _start(schedules: Sequence[RankSchedule]) -> list[tuple[int, Action, int]]:
    """Return what every rank starts now, with the version that each computation uses."""
    started = []
    for rank, schedule in enumerate(schedules):
        for _ in _LANES:
            action = schedule.next()
            if action is None:
                break
            version = schedule.version_of(action.index) if action.lane == COMPUTE else 0
            started.append((rank, action, version))
    return started


def _message(action: Action, version: int) -> Message | None:
    if action.kind == FORWARD:
        return Message(FORWARD, action.stage + 1, action.index, version)
    if action.kind == BACKWARD:
        return Message(BACKWARD, action.stage - 1, action.index, version)
    return None
