"""What a schedule is told when the user did not: the injection limit that the costs ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ganglion.decide.costs import StageTimes, injection_limit
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import ScheduleOptions, canonical_schedule


def with_default_limit(
    name: str,
    options: ScheduleOptions,
    times: Sequence[StageTimes],
    num_microbatches: int,
) -> ScheduleOptions:
    """Give message_driven the limit its links and jitter need, unless one was chosen."""
    if canonical_schedule(name, "schedule") != "message_driven" or options.limit is not None:
        return options
    return dataclasses.replace(options, limit=injection_limit(times, num_microbatches))


def with_known_costs(plan: Plan, times: Sequence[StageTimes]) -> Plan:
    """Return the plan with what the costs of its stages decide, unless it was chosen: its limit."""
    if canonical_schedule(plan.schedule) != "message_driven" or plan.limit:
        return plan
    return dataclasses.replace(plan, limit=injection_limit(times, plan.num_microbatches))
