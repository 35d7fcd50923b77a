"""What comes next: the pure rules that the engine and the simulator both follow."""

from ganglion.schedules.buckets import Bucket, plan_buckets
from ganglion.schedules.follow import Follower
from ganglion.schedules.forward_only import ForwardOnly
from ganglion.schedules.holding import Holding, planned_holding
from ganglion.schedules.listed import ListedSchedule
from ganglion.schedules.names import SCHEDULES, canonical_schedule
from ganglion.schedules.planned import (
    check_planned,
    planned_options,
    planned_schedule,
    planned_stage_map,
)
from ganglion.schedules.registry import (
    BUILT_IN,
    Registry,
    ScheduleOptions,
    make_schedule,
    stage_map_of,
)
from ganglion.schedules.rehearse import check_rehearsal, rehearse
from ganglion.schedules.schedule import RankSchedule, Schedule, StageSchedule
from ganglion.schedules.stage_map import StageMap

__all__ = [
    "BUILT_IN",
    "SCHEDULES",
    "Bucket",
    "Follower",
    "ForwardOnly",
    "Holding",
    "ListedSchedule",
    "RankSchedule",
    "Registry",
    "Schedule",
    "ScheduleOptions",
    "StageMap",
    "StageSchedule",
    "canonical_schedule",
    "check_planned",
    "check_rehearsal",
    "make_schedule",
    "plan_buckets",
    "planned_holding",
    "planned_options",
    "planned_schedule",
    "planned_stage_map",
    "rehearse",
    "stage_map_of",
]
