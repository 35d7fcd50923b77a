"""The figures of a simulated plan, of many microbatches taken from few.

Once a pipeline is full, each microbatch adds the same time to a step, so the figures of n
microbatches lie on a line through those of two shorter steps:

    T(n) = T(b) + (n - b) (T(b) - T(a)) / (b - a)        a < b < n

Steps of u, 2 u and 3 u microbatches are simulated, where u fills the pipeline and hides the
reductions that the next batch may hide; u is doubled until the two differences agree.
A message-driven pipeline repeats itself only roughly (tests/pure/predict/test_fast.py holds both to
the whole simulation). With jitter or disturbances nothing repeats: all microbatches are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ganglion.decide.costs import Cluster, StageTimes
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import (
    BUILT_IN,
    Registry,
    canonical_schedule,
    planned_schedule,
)
from ganglion.decide.simulator.on_cluster import PlanSimulation, simulate_plan, with_known_costs
from ganglion.decide.simulator.options import Disturbance
from ganglion.decide.simulator.result import RankUse

# Up to so many forwards and backwards, plans are simulated whole: that takes a few milliseconds.
WHOLE_ACTIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Times of some steps of a plan; lists have one entry for each pipe rank.

    `step_s` is the mean time from one step's end to the next, the first step left out if there are
    more. `uses` are those of all steps.
    """

    step_s: float
    makespan_s: float
    uses: list[RankUse]
    peak_live: list[int]
    versions: int
    limit: int | None

    @property
    def bubble(self) -> float:
        """1 - work / cost, where cost is the longest span of computation of any rank."""
        cost_s = max(one.last_s - one.first_s for one in self.uses)
        return 1 - max(one.compute_s for one in self.uses) / cost_s if cost_s else 0.0

    @property
    def bubbles(self) -> list[float]:
        """The share of the span of all computations in which each rank does not compute."""
        span_s = max(one.last_s for one in self.uses) - min(one.first_s for one in self.uses)
        return [1 - one.compute_s / span_s if span_s else 0.0 for one in self.uses]


def figures_of(result: PlanSimulation) -> PlanFigures:
    """Return the figures of a simulation."""
    run = result.simulation
    return PlanFigures(
        step_s=step_s(result),
        makespan_s=run.makespan_s,
        uses=run.uses(),
        peak_live=run.peak_live(),
        versions=run.num_versions(),
        limit=result.options.limit,
    )


def step_s(result: PlanSimulation, replica: int | None = None) -> float:
    """Return the mean time between the last updates of steps, of all replicas or of one."""
    ends: dict[int, float] = {}
    for action, _, end_s, _, place in result.simulation.rows:
        if action.kind == "U" and replica in (None, place // result.plan.pipe):
            ends[action.index] = max(end_s, ends.get(action.index, 0.0))
    if len(ends) == 1:
        return ends[0]
    return (ends[max(ends)] - ends[0]) / (len(ends) - 1)


def simulate_figures(
    plan: Plan,
    times: Sequence[StageTimes],
    cluster: Cluster,
    *,
    num_steps: int,
    disturbances: tuple[Disturbance, ...] = (),
    seed: int = 0,
    schedules: Registry = BUILT_IN,
) -> PlanFigures:
    """Return the figures of some steps of a plan, from shorter steps where these are enough."""
    plan = with_known_costs(plan, times)

    def simulated(num_microbatches: int, steps: int) -> PlanFigures:
        return figures_of(
            simulate_plan(
                replace(plan, num_microbatches=num_microbatches),
                times,
                cluster,
                num_steps=steps,
                disturbances=disturbances,
                seed=seed,
                schedules=schedules,
            )
        )

    unit, tolerance = _unit(plan, times, schedules)
    steps = min(num_steps, 2 if planned_schedule(plan, 0, schedules).flushes else 3)
    num_actions = 2 * num_steps * plan.num_microbatches * plan.pipe
    repeats = not disturbances and not any(one.jitter for one in times)
    # Three shorter steps are worth it while they are less work than the whole.
    while repeats and 2 * steps * 6 * unit * plan.pipe < num_actions > WHOLE_ACTIONS:
        sizes = (unit, 2 * unit, 3 * unit)
        found = [_with_steps(simulated(size, steps), steps, num_steps) for size in sizes]
        if _is_straight(found, tolerance):
            return _on_line(found[1], found[2], plan.num_microbatches / unit - 2)
        unit *= 2
    return simulated(plan.num_microbatches, num_steps)


def _unit(plan: Plan, times: Sequence[StageTimes], schedules: Registry) -> tuple[int, float]:
    """Return by how many microbatches steps grow, and the difference at which they agree."""
    schedule = planned_schedule(plan, 0, schedules)
    unit = plan.pipe * math.ceil(max(6, schedule.stage_map.num_stages) / plan.pipe)
    tolerance = 1e-3
    if canonical_schedule(plan.schedule) == "message_driven":
        unit, tolerance = max(unit, plan.limit), 0.02
    if not schedule.flushes:
        slot_s = max(one.slot_s for one in times)
        hidden_s = max(one.reduce_s + one.update_s for one in times)
        unit += plan.pipe * math.ceil(hidden_s / slot_s / plan.pipe) if slot_s else 0
    return unit, tolerance


def _is_straight(found: Sequence[PlanFigures], tolerance: float) -> bool:
    """Return whether the two differences of three step times agree."""
    before, middle, last = (one.step_s for one in found)
    return math.isclose(middle - before, last - middle, rel_tol=tolerance)


def _with_steps(found: PlanFigures, simulated: int, wanted: int) -> PlanFigures:
    """Return the figures of more steps than were simulated: all but the first are alike."""
    later_s = (wanted - simulated) * found.step_s
    uses = [
        RankUse(
            compute_s=use.compute_s * wanted / simulated,
            first_s=use.first_s,
            last_s=use.last_s + later_s,
            waits_s=use.waits_s * wanted / simulated,
        )
        for use in found.uses
    ]
    return replace(found, makespan_s=found.makespan_s + later_s, uses=uses)


def _on_line(short: PlanFigures, long: PlanFigures, way: float) -> PlanFigures:
    """Return the figures that lie `way` times as far from the short step as the long one does."""

    def at(a: float, b: float) -> float:
        return a + way * (b - a)

    uses = [
        RankUse(
            compute_s=at(a.compute_s, b.compute_s),
            first_s=at(a.first_s, b.first_s),
            last_s=at(a.last_s, b.last_s),
            waits_s=max(0.0, at(a.waits_s, b.waits_s)),
        )
        for a, b in zip(short.uses, long.uses, strict=True)
    ]
    return PlanFigures(
        step_s=at(short.step_s, long.step_s),
        makespan_s=at(short.makespan_s, long.makespan_s),
        uses=uses,
        peak_live=[round(at(*pair)) for pair in zip(short.peak_live, long.peak_live, strict=True)],
        versions=long.versions,
        limit=long.limit,
    )
