"""Schedules by name: from a word the user typed to the state machine of one stage."""

from __future__ import annotations

from dataclasses import dataclass

from ganglion.errors import ConfigError, NotBuiltError
from ganglion.schedules.flush import GPipe, OneFOneB
from ganglion.schedules.message_driven import BACKWARD_FIRST, MessageDriven, TwoBW
from ganglion.schedules.names import canonical_schedule
from ganglion.schedules.schedule import StageSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """What some schedules can be told; a setting that a schedule does not know is refused."""

    limit: int | None = None
    extra: int | None = None
    priority: str | None = None


def make_schedule(
    name: str, stage: int, num_stages: int, options: ScheduleOptions | None = None
) -> StageSchedule:
    """Return the schedule called `name` for one stage."""
    options = options or ScheduleOptions()
    canonical = canonical_schedule(name, key="schedule")
    if canonical == "message_driven":
        _refuse(canonical, extra=options.extra)
        priority = options.priority or BACKWARD_FIRST
        return MessageDriven(stage, num_stages, limit=options.limit, priority=priority)
    if canonical == "two_bw":
        _refuse(canonical, limit=options.limit, priority=options.priority)
        return TwoBW(stage, num_stages, extra=options.extra or 0)
    if canonical in ("gpipe", "one_f_one_b"):
        _refuse(canonical, limit=options.limit, extra=options.extra, priority=options.priority)
        return GPipe(stage, num_stages) if canonical == "gpipe" else OneFOneB(stage, num_stages)
    raise NotBuiltError(
        f"schedule {canonical!r} is not built yet: choose gpipe, one_f_one_b, message_driven or "
        f"two_bw"
    )


def _refuse(name: str, **settings: object) -> None:
    for setting, value in settings.items():
        if value is not None:
            raise ConfigError(f"{name} has no {setting}: leave out --{setting}")
