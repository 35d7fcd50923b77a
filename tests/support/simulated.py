"""Simulate a schedule and check that the result obeys the laws."""

from __future__ import annotations

from collections.abc import Sequence

from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import ScheduleOptions, make_schedule
from ganglion.decide.schedules.pipeline.laws import Case, check_laws
from ganglion.decide.simulator import Simulation, SimulationOptions, simulate

UNIT = StageTimes(forward_s=1, backward_s=1, weight_s=1)


def run(
    name: str,
    num_ranks: int,
    batches: tuple[int, ...],
    times: Sequence[StageTimes] | None = None,
    options: ScheduleOptions | None = None,
    seed: int = 0,
) -> Simulation:
    """Simulate a pipeline of `num_ranks`; without times forward 1 s and each backward half 1 s."""
    schedules = [make_schedule(name, rank, num_ranks, options) for rank in range(num_ranks)]
    times = times or [UNIT] * schedules[0].stage_map.num_stages
    result = simulate(
        lambda rank: make_schedule(name, rank, num_ranks, options),
        times,
        batches,
        SimulationOptions(seed=seed),
    )
    for schedule in schedules:
        for size in batches:
            schedule.admit(size)
    check_laws(Case.of(schedules, batches), result.steps())
    return result
