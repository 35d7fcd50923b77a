"""What comes next: the pure rules that the engine and the simulator both follow."""

from ganglion.schedules.buckets import Bucket, plan_buckets
from ganglion.schedules.follow import Follower, Leader
from ganglion.schedules.names import SCHEDULES, canonical_schedule
from ganglion.schedules.registry import ScheduleOptions, make_schedule, stage_map_of
from ganglion.schedules.schedule import RankSchedule, Schedule, StageSchedule
from ganglion.schedules.stage_map import StageMap

__all__ = [
    "SCHEDULES",
    "Bucket",
    "Follower",
    "Leader",
    "RankSchedule",
    "Schedule",
    "ScheduleOptions",
    "StageMap",
    "StageSchedule",
    "canonical_schedule",
    "make_schedule",
    "plan_buckets",
    "stage_map_of",
]
