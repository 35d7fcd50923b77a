"""Pipeline schedules: which action a rank does next, and the laws that hold for all of them.

Pure state machines: no clock, no costs, no tensors.
"""

from ganglion.decide.schedules.pipeline.action import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    UPDATE,
    WEIGHT,
    Action,
    Message,
    Order,
    action,
)
from ganglion.decide.schedules.pipeline.forward_only import ForwardOnly
from ganglion.decide.schedules.pipeline.laws import (
    Step,
    check_rehearsal,
    peak_live,
    rehearse,
    versions_kept,
)
from ganglion.decide.schedules.pipeline.listed import ListedSchedule
from ganglion.decide.schedules.pipeline.planned import (
    Holding,
    check_planned,
    planned_holding,
    planned_options,
    planned_schedule,
    planned_stage_map,
)
from ganglion.decide.schedules.pipeline.registry import (
    BUILT_IN,
    SCHEDULES,
    Registry,
    ScheduleOptions,
    canonical_schedule,
    make_schedule,
    stage_map_of,
)
from ganglion.decide.schedules.pipeline.schedule import (
    Follower,
    RankSchedule,
    StageMap,
    StageSchedule,
)

__all__ = [
    "BACKWARD",
    "BUILT_IN",
    "COMPUTE",
    "FORWARD",
    "REDUCE",
    "SCHEDULES",
    "UPDATE",
    "WEIGHT",
    "Action",
    "Follower",
    "ForwardOnly",
    "Holding",
    "ListedSchedule",
    "Message",
    "Order",
    "RankSchedule",
    "Registry",
    "ScheduleOptions",
    "StageMap",
    "StageSchedule",
    "Step",
    "action",
    "canonical_schedule",
    "check_planned",
    "check_rehearsal",
    "make_schedule",
    "peak_live",
    "planned_holding",
    "planned_options",
    "planned_schedule",
    "planned_stage_map",
    "rehearse",
    "stage_map_of",
    "versions_kept",
]
