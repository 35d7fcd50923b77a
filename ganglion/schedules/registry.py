"""Schedules by name: from a word the user typed to the state machine of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from ganglion.errors import ConfigError
from ganglion.schedules.flush import GPipe, OneFOneB
from ganglion.schedules.interleaved import Interleaved
from ganglion.schedules.message_driven import BACKWARD_FIRST, MessageDriven, TwoBW
from ganglion.schedules.names import canonical_schedule
from ganglion.schedules.schedule import RankSchedule
from ganglion.schedules.stage_map import StageMap
from ganglion.schedules.stash import Stash
from ganglion.schedules.zero_bubble import ZeroBubble, ZeroBubbleV


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """What some schedules can be told; a setting that a schedule does not know is refused."""

    limit: int | None = None
    extra: int | None = None
    priority: str | None = None
    chunks: int | None = None


Make = Callable[[int, int, ScheduleOptions], RankSchedule]

# Each schedule: the options it takes, and how one rank's is made.
_SCHEDULES: dict[str, tuple[tuple[str, ...], Make]] = {
    "gpipe": ((), lambda rank, ranks, options: GPipe(rank, ranks)),
    "one_f_one_b": ((), lambda rank, ranks, options: OneFOneB(rank, ranks)),
    "interleaved": (
        ("chunks",),
        lambda rank, ranks, options: Interleaved(
            rank, ranks, num_chunks=2 if options.chunks is None else options.chunks
        ),
    ),
    "zero_bubble": ((), lambda rank, ranks, options: ZeroBubble(rank, ranks)),
    "zero_bubble_v": ((), lambda rank, ranks, options: ZeroBubbleV(rank, ranks)),
    "message_driven": (
        ("limit", "priority"),
        lambda rank, ranks, options: MessageDriven(
            rank, ranks, limit=options.limit, priority=options.priority or BACKWARD_FIRST
        ),
    ),
    "two_bw": (
        ("extra",),
        lambda rank, ranks, options: TwoBW(rank, ranks, extra=options.extra or 0),
    ),
    "stash": ((), lambda rank, ranks, options: Stash(rank, ranks)),
}


def make_schedule(
    name: str, rank: int, num_ranks: int, options: ScheduleOptions | None = None
) -> RankSchedule:
    """Return the schedule called `name` for one rank of a pipeline."""
    options = options or ScheduleOptions()
    canonical = canonical_schedule(name, key="schedule")
    known, make = _SCHEDULES[canonical]
    for option in fields(options):
        if getattr(options, option.name) is not None and option.name not in known:
            raise ConfigError(f"{canonical} has no {option.name}: leave out --{option.name}")
    return make(rank, num_ranks, options)


def stage_map_of(name: str, num_ranks: int, options: ScheduleOptions | None = None) -> StageMap:
    """Return which stages each rank holds under the schedule called `name`."""
    return make_schedule(name, 0, num_ranks, options).stage_map
