"""What comes next: the pure rules that the engine and the simulator both follow."""

from ganglion.schedules.buckets import Bucket, plan_buckets
from ganglion.schedules.names import SCHEDULES, canonical_schedule
from ganglion.schedules.registry import ScheduleOptions, make_schedule
from ganglion.schedules.schedule import Schedule, StageSchedule

__all__ = [
    "SCHEDULES",
    "Bucket",
    "Schedule",
    "ScheduleOptions",
    "StageSchedule",
    "canonical_schedule",
    "make_schedule",
    "plan_buckets",
]
