"""The measured steps of a pipeline beside those of the simulator.

    steps      1  2  3 | 4  5  6  7 ...
    used for   costs   | measured step time and idle share, against a simulation with those costs

Both sides are traces of the same events and go through the same functions. A pipeline that is
evaluated or saved is drained: the longest run of steps between two such pauses is compared, and as
many are simulated, so filling and draining count on both sides.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from ganglion.decide.config import TRACE
from ganglion.decide.costs import StageTimes
from ganglion.decide.plan import Plan
from ganglion.decide.predict.measured_times import computing, measured_times
from ganglion.decide.schedules.pipeline import StageMap, planned_schedule, planned_stage_map
from ganglion.decide.simulator import SimulationOptions, simulate
from ganglion.errors import DataError
from ganglion.trace import NONE, UPDATE, Event, Interval, common, total_s

NUM_LEARNED = 3  # steps that the costs are taken from
MIN_STEPS = 5
MAX_STEPS = 50  # what is read of a long run
_MAX_SIMULATED = 300_000  # computations: a few seconds
_FILE = re.compile(r"rank\d+(?:-from-(\d+))?\.jsonl")
_PAUSES = ("evaluate", "checkpoint")


@dataclass(frozen=True, slots=True)
class Window:
    """The steps compared, `first` to `last`; the pipeline was filled at step `filled`."""

    filled: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the steps of a window; lists go by pipe coordinate."""

    step_s: float
    bubble: float
    busy_s: list[float]
    bubbles: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run against its prediction; steps count from 1, as in the metrics."""

    schedule: str
    first_step: int
    last_step: int
    num_ranks: int
    num_cores: int
    measured: Figures
    predicted: Figures
    times: list[StageTimes]


def compare(folder: Path, plan: Plan, num_cores: int) -> Comparison:
    """Compare the newest launch of a run with a simulation fed with its first steps."""
    first, events = read_steps(folder)
    window = choose_window(events, first)
    stage_map = planned_stage_map(plan)
    learned = [event for event in events if first <= event.step < first + NUM_LEARNED]
    times = measured_times(learned, plan, stage_map)
    places = {rank: plan.mesh().coordinates(rank).pipe for rank in range(plan.mesh().num_ranks)}
    return Comparison(
        schedule=plan.schedule,
        first_step=window.first + 1,
        last_step=window.last + 1,
        num_ranks=plan.num_ranks,
        num_cores=num_cores,
        measured=figures(events, window, places),
        predicted=_predicted(plan, stage_map, times, window),
        times=times,
    )


def read_steps(folder: Path) -> tuple[int, list[Event]]:
    """Return the first step of the newest launch and the events of its first steps."""
    launches: dict[int, list[Path]] = defaultdict(list)
    for path in (folder / TRACE).glob("rank*.jsonl"):
        match = _FILE.fullmatch(path.name)
        if match:
            launches[int(match[1] or 0)].append(path)
    if not launches:
        raise DataError("the run has no trace; set trace.enabled = true")
    first = max(launches)
    limit = first + NUM_LEARNED + MAX_STEPS
    events = [event for path in sorted(launches[first]) for event in _read(path, limit)]
    return first, events


def _read(path: Path, limit: int) -> Iterator[Event]:
    """Yield the events up to step `limit`; a step later everything of it has been written."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            event = Event(**json.loads(line))
            if event.step > limit + 1:
                return
            if event.step <= limit:
                yield event


def choose_window(events: Sequence[Event], first: int) -> Window:
    """Return the longest run of whole steps after the learned ones that nothing interrupted."""
    last = _last_whole_step(events)
    if last - first + 1 < MIN_STEPS:
        raise DataError(
            f"{last - first + 1} steps are too few: the first {NUM_LEARNED} tell the costs, and at "
            f"least {MIN_STEPS - NUM_LEARNED} more are needed"
        )
    pauses = {event.step for event in events if event.kind in _PAUSES and event.step != NONE}
    windows = []
    filled = first
    for step in range(first, last + 1):
        if step in pauses or step == last:
            # A step is timed from the end of the one before, which must be of the same run.
            windows.append(Window(filled, max(filled + 1, first + NUM_LEARNED), step))
            filled = step + 1
    best = max(windows, key=lambda window: window.last - window.first)
    if best.last < best.first:
        raise DataError(
            "every step was followed by an evaluation or a checkpoint: raise train.eval_every or "
            "checkpoint.every"
        )
    return best


def _last_whole_step(events: Iterable[Event]) -> int:
    newest: dict[tuple[int, int], int] = defaultdict(lambda: NONE)
    for event in events:
        if event.kind == UPDATE:
            place = (event.rank, event.stage)
            newest[place] = max(newest[place], event.step)
    return min(newest.values(), default=NONE)


def figures(events: Sequence[Event], window: Window, places: dict[int, int]) -> Figures:
    """Measure each step of a window; `places` gives the pipe coordinate of every rank.

    The idle share of a rank in a step is 1 - the time it ran stages / the length of the step.
    """
    steps = _step_intervals(events, window)
    busy: dict[int, list[float]] = defaultdict(list)  # by rank: seconds in each step
    for rank, intervals in computing(events).items():
        busy[rank] = [total_s(common(intervals, [step])) for step in steps]
    lengths = [end_s - begin_s for begin_s, end_s in steps]
    shares = {rank: _share(found, lengths) for rank, found in busy.items()}
    by_place: dict[int, list[int]] = defaultdict(list)
    for rank in busy:
        by_place[places[rank]].append(rank)
    ranks = [by_place[place] for place in sorted(by_place)]
    bubbles = [mean(1 - shares[rank] for rank in group) for group in ranks]
    return Figures(
        step_s=median(lengths),
        bubble=mean(bubbles),
        busy_s=[mean(median(busy[rank]) for rank in group) for group in ranks],
        bubbles=bubbles,
    )


def _share(busy_s: Sequence[float], lengths: Sequence[float]) -> float:
    return median([one / length for one, length in zip(busy_s, lengths, strict=True)])


def _step_intervals(events: Iterable[Event], window: Window) -> list[Interval]:
    """Return each step of a window, from the last update of the step before to its own last."""
    ends: dict[int, float] = defaultdict(float)
    for event in events:
        if event.kind == UPDATE:
            ends[event.step] = max(ends[event.step], event.end_s)
    return [(ends[step - 1], ends[step]) for step in range(window.first, window.last + 1)]


def _predicted(
    plan: Plan, stage_map: StageMap, times: Sequence[StageTimes], window: Window
) -> Figures:
    """Simulate the pipeline from where it was filled, and measure the same steps."""
    per_step = plan.num_microbatches * stage_map.num_stages * 2
    ahead = window.first - window.filled
    most = max(ahead + 2, _MAX_SIMULATED // per_step)
    num_steps = min(window.last - window.filled + 1, most)
    simulation = simulate(
        lambda rank: planned_schedule(plan, rank),
        times,
        [plan.num_microbatches] * num_steps,
        SimulationOptions(num_replicas=plan.data),
    )
    places = {place: place % stage_map.num_ranks for place in range(simulation.num_ranks)}
    return figures(simulation.events(), Window(0, ahead, num_steps - 1), places)
