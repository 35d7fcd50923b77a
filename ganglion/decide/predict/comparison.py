"""The measured steps of a pipeline beside those of the simulator.

    steps      1  2  3 | 4  5  6  7 ...
    used for   costs   | measured step time and idle share, against a simulation with those costs

Both sides are traces of the same events and go through the same functions. A pipeline that is
evaluated or saved is drained: the longest run of steps between two such pauses is compared, and as
many are simulated, so filling and draining count on both sides.

The costs of a stage are medians of its trace. A computation counts with the handing over of its
result, which the engine does inside it; so a message is under way from the end of that. A rank that
computes reads its mail later: only messages that a rank waited for show how long one takes.
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
from ganglion.decide.schedules.pipeline import StageMap, planned_schedule, planned_stage_map
from ganglion.decide.simulator import SimulationOptions, simulate
from ganglion.errors import DataError
from ganglion.trace import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    NONE,
    REDUCE,
    UPDATE,
    WEIGHT,
    Event,
    Interval,
    common,
    match_messages,
    merged,
    total_s,
)

NUM_LEARNED = 3  # steps that the costs are taken from
MIN_STEPS = 5
MAX_STEPS = 50  # read of a long run
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
            f"{last - first + 1} steps are too few: the first {NUM_LEARNED} give the costs, and at "
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


# --- the costs of stages -------------------------------------------------------------------------


_TIMED = (FORWARD, BACKWARD, WEIGHT, UPDATE)


def measured_times(events: Sequence[Event], plan: Plan, stage_map: StageMap) -> list[StageTimes]:
    """Return the times of every stage; raises DataError if the trace lacks one."""
    lengths: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if event.kind in _TIMED:
            lengths[event.kind, event.stage].append(event.duration_s)
    medians = {key: median(found) for key, found in lengths.items()}
    latencies, sizes = _messages(events)
    reductions = summed_reductions(events, plan, stage_map) if plan.data > 1 else {}
    times = []
    for stage in range(stage_map.num_stages):
        if (FORWARD, stage) not in medians or (BACKWARD, stage) not in medians:
            raise DataError(f"the trace of its first steps lacks stage {stage}")
        times.append(
            StageTimes(
                forward_s=medians[FORWARD, stage],
                backward_s=medians[BACKWARD, stage],
                weight_s=medians.get((WEIGHT, stage), 0.0),
                update_s=medians.get((UPDATE, stage), 0.0),
                reduce_s=reductions.get(stage_map.rank_of(stage), 0.0) / stage_map.num_chunks,
                latency_s=latencies.get(stage, 0.0),
                message_bytes=sizes.get(stage, 0),
            )
        )
    return times


def computing(events: Iterable[Event]) -> dict[int, list[Interval]]:
    """Return by rank when it ran stages; evaluation is no part of a step."""
    found: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if event.lane == COMPUTE and event.kind in _TIMED:
            found[event.rank].append((event.start_s, event.end_s))
    return {rank: merged(intervals) for rank, intervals in found.items()}


def awaited_messages(events: Sequence[Event]) -> dict[int, float]:
    """Return how long a message over each boundary is under way, by the stage before it."""
    return _messages(events)[0]


def _messages(events: Sequence[Event]) -> tuple[dict[int, float], dict[int, int]]:
    """Return latency and bytes of the messages over each boundary, by the stage before it."""
    busy = computing(events)
    awaited: dict[int, list[float]] = defaultdict(list)
    taken: dict[int, list[float]] = defaultdict(list)
    sizes: dict[int, list[int]] = defaultdict(list)
    for send, receive in match_messages(events):
        hop = receive.stage - 1 if receive.kind == "receive_forward" else receive.stage
        begin_s, end_s = send.end_s, max(send.end_s, receive.end_s)
        sizes[hop].append(send.bytes)
        taken[hop].append(end_s - begin_s)
        if not common(busy.get(receive.rank, []), [(begin_s, end_s)]):
            awaited[hop].append(end_s - begin_s)
    # Where no rank ever waited, the quickest message is the best estimate.
    latencies = {hop: median(awaited[hop]) if awaited[hop] else min(taken[hop]) for hop in taken}
    return latencies, {hop: int(median(found)) for hop, found in sizes.items()}


def summed_reductions(events: Iterable[Event], plan: Plan, stage_map: StageMap) -> dict[int, float]:
    """Return by pipe coordinate how long the gradients of a step are summed over the replicas.

    The first rank waits for the others; the last to come shows the time of the sum itself.
    """
    mesh = plan.mesh()
    parts: dict[tuple[int, int, int], list[Interval]] = defaultdict(list)
    for event in events:
        if event.kind == REDUCE:
            pipe = mesh.coordinates(event.rank).pipe
            parts[pipe, event.step, event.rank].append((event.start_s, event.end_s))
    quickest: dict[tuple[int, int], float] = {}
    for (pipe, step, _), intervals in parts.items():
        took_s = total_s(merged(intervals))
        quickest[pipe, step] = min(took_s, quickest.get((pipe, step), took_s))
    return {
        pipe: median([took_s for (at, _), took_s in quickest.items() if at == pipe])
        for pipe in range(stage_map.num_ranks)
        if any(at == pipe for at, _ in quickest)
    }
