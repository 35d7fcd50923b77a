"""A predicted trace compared with a measured one: where the difference in time comes from.

All numbers are per step and per rank, so that one simulated step of one replica can be compared
with a hundred measured steps of four. A stage's span is the time from its first to its last event
of a step, summed over all steps: time between two steps is left out. It has three parts:

    span = compute + link + waiting
    compute   the stage computes, or updates its weights
    link      its rank computes nothing, while a message to the stage or its reduction is under way
    waiting   the rest: for others, for the host, for other stages of the same rank
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median

from ganglion.errors import ConfigError, DataError
from ganglion.trace.event import COMPUTE, NONE, UPDATE, Event
from ganglion.trace.statistics import (
    Interval,
    common,
    match_messages,
    merged,
    outside_s,
    time_span,
    total_s,
    under_way,
)

CAUSES = ("compute", "link", "waiting")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A stage, on all its ranks; or a rank, where events have no stage."""

    stage: int
    rank: int = NONE

    def __str__(self) -> str:
        return f"stage {self.stage}" if self.stage != NONE else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    """Number and time of events of one kind at one place, per step and rank.

    `median_s` is the median of single events.
    """

    count: float = 0.0
    median_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDiff:
    """One kind at one place, in both traces."""

    kind: str
    place: Place
    predicted: KindTimes
    measured: KindTimes

    @property
    def residual_s(self) -> float:
        """How much longer than predicted this took per step."""
        return self.measured.total_s - self.predicted.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A place's span per step and rank, and its parts."""

    span_s: float
    compute_s: float
    link_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDiff:
    """The span of one place in both traces; `difference` is measured - predicted, part by part."""

    place: Place
    predicted: Spent
    measured: Spent
    difference: Spent

    @property
    def largest_cause(self) -> str:
        """The part that differs most: compute, link or waiting."""
        return max(CAUSES, key=lambda cause: abs(getattr(self.difference, f"{cause}_s")))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiff:
    """Two traces compared."""

    predicted_steps: int
    measured_steps: int
    kinds: tuple[KindDiff, ...]
    places: tuple[PlaceDiff, ...]


def diff_traces(
    predicted: Sequence[Event],
    measured: Sequence[Event],
    *,
    predicted_steps: int | None = None,
    measured_steps: int | None = None,
) -> TraceDiff:
    """Compare two traces stage by stage; rank by rank if one of them has no stages.

    Unless given, the number of steps of a trace is that of different steps among its updates (else
    among all its events, else 1). Raise DataError if a trace is empty or they share no place.
    """
    traces = (predicted, measured)
    by_stage = all(any(event.stage != NONE for event in trace) for trace in traces)
    steps = (_checked(predicted_steps, predicted), _checked(measured_steps, measured))
    return TraceDiff(
        predicted_steps=steps[0],
        measured_steps=steps[1],
        kinds=tuple(_kind_diffs(traces, steps, by_stage)),
        places=tuple(_place_diffs(traces, steps, by_stage)),
    )


def count_steps(events: Sequence[Event]) -> int:
    """Return the number of steps in a trace; raise DataError if it is empty."""
    time_span(events)
    updates = {event.step for event in events if event.kind == UPDATE} - {NONE}
    return len(updates or {event.step for event in events} - {NONE}) or 1


Pair = tuple[Sequence[Event], Sequence[Event]]


def _checked(given: int | None, events: Sequence[Event]) -> int:
    if given is not None and given < 1:
        raise ConfigError(f"a trace of {given} steps cannot be compared; give 1 or more")
    return given or count_steps(events)


def _kind_diffs(traces: Pair, steps: tuple[int, int], by_stage: bool) -> list[KindDiff]:
    sides = [_kind_times(trace, n, by_stage) for trace, n in zip(traces, steps, strict=True)]
    none = KindTimes()
    return [
        KindDiff(
            kind=kind,
            place=place,
            predicted=sides[0].get((place, kind), none),
            measured=sides[1].get((place, kind), none),
        )
        for place, kind in sorted(sides[0].keys() | sides[1].keys())
    ]


def _kind_times(
    events: Iterable[Event], num_steps: int, by_stage: bool
) -> dict[tuple[Place, str], KindTimes]:
    found: dict[tuple[Place, str], list[Event]] = defaultdict(list)
    for event in events:
        found[_place(event, by_stage), event.kind].append(event)
    times = {}
    for key, same in found.items():
        share = num_steps * len({event.rank for event in same})
        durations = [event.duration_s for event in same]
        times[key] = KindTimes(
            count=len(same) / share, median_s=median(durations), total_s=sum(durations) / share
        )
    return times


def _place(event: Event, by_stage: bool) -> Place:
    if by_stage and event.stage != NONE:
        return Place(event.stage)
    return Place(NONE, event.rank)


def _place_diffs(traces: Pair, steps: tuple[int, int], by_stage: bool) -> list[PlaceDiff]:
    predicted, measured = (
        _spent(trace, n, by_stage) for trace, n in zip(traces, steps, strict=True)
    )
    common = sorted(predicted.keys() & measured.keys())
    if not common:
        raise DataError(
            f"nothing to compare: predicted has {_listed(predicted)}, measured has "
            f"{_listed(measured)}; give two traces of one plan"
        )
    return [
        PlaceDiff(
            place=place,
            predicted=predicted[place],
            measured=measured[place],
            difference=_minus(measured[place], predicted[place]),
        )
        for place in common
    ]


def _listed(places: Iterable[Place]) -> str:
    return ", ".join(map(str, sorted(places)))


def _spent(events: Sequence[Event], num_steps: int, by_stage: bool) -> dict[Place, Spent]:
    """Return how each place spent its time, averaged over its ranks."""
    parts: dict[Place, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    worked: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if _is_work(event):
            worked[event.rank].append((event.start_s, event.end_s))
        if event.stage != NONE or not by_stage:
            parts[_place(event, by_stage)][event.rank].append(event)
    waited = under_way(events, match_messages(events))
    busy = {rank: merged(intervals) for rank, intervals in worked.items()}
    found = {}
    for place, by_rank in parts.items():
        links = {r: [i for s, i in waited[r] if place.stage in (s, NONE)] for r in by_rank}
        spent = [_spent_on(by_rank[r], links[r], busy.get(r, [])) for r in by_rank]
        found[place] = _mean(spent, num_steps)
    return found


def _spent_on(events: Sequence[Event], links: list[Interval], busy: list[Interval]) -> Spent:
    """Return the parts of a place's span on one rank, which computes any stage in `busy`."""
    span = _span(events)
    compute_s = total_s(merged((e.start_s, e.end_s) for e in events if _is_work(e)))
    link_s = outside_s(common(merged(links), span), busy)
    waiting_s = total_s(span) - compute_s - link_s
    return Spent(span_s=total_s(span), compute_s=compute_s, link_s=link_s, waiting_s=waiting_s)


def _span(events: Sequence[Event]) -> list[Interval]:
    """Return the spans of the steps of a place, merged."""
    updates = sorted((e.end_s, e.step) for e in events if e.kind == UPDATE and e.step != NONE)
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        # A simulated computation has no step: it is that of the next update.
        following = bisect_left(updates, (event.end_s, NONE))
        next_step = updates[following][1] if following < len(updates) else NONE
        by_step[next_step if event.step == NONE else event.step].append(event)
    return merged(time_span(same) for same in by_step.values())


def _is_work(event: Event) -> bool:
    # An update may be on the host lane in one trace and on the compute lane in the other.
    return event.lane == COMPUTE or event.kind == UPDATE


def _mean(spent: Sequence[Spent], num_steps: int) -> Spent:
    share = len(spent) * num_steps
    return Spent(
        **{f.name: sum(getattr(one, f.name) for one in spent) / share for f in fields(Spent)}
    )


def _minus(one: Spent, other: Spent) -> Spent:
    return Spent(**{f.name: getattr(one, f.name) - getattr(other, f.name) for f in fields(Spent)})
