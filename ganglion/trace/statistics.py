"""Statistics of a trace: busy and idle times of ranks, bubbles, use of links and axes.

All times are lengths of unions of intervals, so that concurrent events are not counted twice:

    compute  ##### ######    ###      busy: the length of this
    comm        =====  ======         exposed: the part of this with nothing above it
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ganglion.errors import DataError
from ganglion.trace.event import (
    BACKWARD,
    COMM,
    COMPUTE,
    FORWARD,
    NONE,
    RECEIVES,
    SENDS,
    UPDATE,
    WEIGHT,
    Event,
)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatistics:
    """One rank. `busy_s` is the time with at least one event of a kind, on any lane.

    `compute_s` is the busy time of the compute lane; `bubble` is 1 - compute_s / the compute span
    of the whole trace (first start to last end of any computation, on any rank), so filling and
    draining a pipeline count. `exposed_comm_s` is the time in which the rank computed nothing while
    a message to it (from the start of its send) or one of its collectives was under way.
    `peak_live`: the most (stage, microbatch) pairs between the start of their forward and the end
    of their backward, or weight. `versions`, by stage: the most weight versions in use at once, by
    live microbatches or as the newest; empty where the trace has none.
    """

    rank: int
    stages: tuple[int, ...]
    busy_s: Mapping[str, float]
    compute_s: float
    bubble: float
    exposed_comm_s: float
    peak_live: int
    versions: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """Messages from one rank to another; busy while one is being sent, `use` is busy / span."""

    source: int
    target: int
    num_messages: int
    bytes: int
    busy_s: float
    use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStatistics:
    """Collectives along one axis; each is counted once on every rank that takes part."""

    axis: str
    num_collectives: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """A whole trace; `span_s` is the time from the first start to the last end on any lane.

    `num_unmatched` counts sends and receives whose other end is not in the trace.
    """

    span_s: float
    compute_span_s: float
    ranks: tuple[RankStatistics, ...]
    links: tuple[LinkStatistics, ...]
    axes: tuple[AxisStatistics, ...]
    num_unmatched: int


def summarise(events: Sequence[Event]) -> TraceStatistics:
    """Return the statistics of a trace; raise DataError if it is empty."""
    start_s, end_s = time_span(events)
    messages = match_messages(events)
    num_ends = sum(event.kind in SENDS or event.kind in RECEIVES for event in events)
    computed = merged((e.start_s, e.end_s) for e in events if e.lane == COMPUTE)
    compute_span_s = computed[-1][1] - computed[0][0] if computed else 0.0
    return TraceStatistics(
        span_s=end_s - start_s,
        compute_span_s=compute_span_s,
        ranks=tuple(_all_ranks(events, messages, compute_span_s)),
        links=tuple(_links(messages, end_s - start_s)),
        axes=tuple(_axes(events)),
        num_unmatched=num_ends - 2 * len(messages),
    )


def time_span(events: Sequence[Event]) -> Interval:
    """Return the first start and the last end; raise DataError if there are no events."""
    if not events:
        raise DataError(
            "the trace holds no events; record one with trace.enabled = true in the run file"
        )
    return min(event.start_s for event in events), max(event.end_s for event in events)


def match_messages(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """Return (send, receive) of each message whose two ends are in the trace."""
    known = [event for event in events if event.flow != NONE]
    sends = {event.flow: event for event in known if event.kind in SENDS}
    return [(sends[e.flow], e) for e in known if e.kind in RECEIVES and e.flow in sends]


def is_collective(event: Event) -> bool:
    """Return whether an event is communication of a group, not a message between two ranks."""
    return event.lane == COMM and event.kind not in SENDS and event.kind not in RECEIVES


def under_way(
    events: Iterable[Event], messages: Iterable[tuple[Event, Event]]
) -> dict[int, list[tuple[int, Interval]]]:
    """Return by rank the (stage, interval) of the messages and collectives it may wait for."""
    sent_s = {receive.flow: send.start_s for send, receive in messages}
    found: dict[int, list[tuple[int, Interval]]] = defaultdict(list)
    for event in events:
        if event.kind in RECEIVES:
            # The clocks of two ranks differ a little: a message must not end before it begins.
            begin_s = min(sent_s.get(event.flow, event.start_s), event.end_s)
            found[event.rank].append((event.stage, (begin_s, event.end_s)))
        elif is_collective(event):
            found[event.rank].append((event.stage, (event.start_s, event.end_s)))
    return found


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order."""
    union: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if union and start_s <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end_s))
        else:
            union.append((start_s, end_s))
    return union


def total_s(union: Iterable[Interval]) -> float:
    """Return the length of a union."""
    return sum(end_s - start_s for start_s, end_s in union)


def common(union: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions; both as `merged` returns them."""
    shared: list[Interval] = []
    here = there = 0
    while here < len(union) and there < len(others):
        start_s = max(union[here][0], others[there][0])
        end_s = min(union[here][1], others[there][1])
        if start_s < end_s:
            shared.append((start_s, end_s))
        if union[here][1] < others[there][1]:
            here += 1
        else:
            there += 1
    return shared


def outside_s(union: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Return the length of one union outside another; both as `merged` returns them."""
    return total_s(union) - total_s(common(union, others))


def stages_of(events: Iterable[Event]) -> dict[int, tuple[int, ...]]:
    """Return the stages of each rank of a trace, in order; a rank may have none."""
    found: dict[int, set[int]] = defaultdict(set)
    for event in events:
        found[event.rank].update(() if event.stage == NONE else (event.stage,))
    return {rank: tuple(sorted(stages)) for rank, stages in sorted(found.items())}


def _all_ranks(
    events: Sequence[Event], messages: list[tuple[Event, Event]], compute_span_s: float
) -> Iterable[RankStatistics]:
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_s):
        by_rank[event.rank].append(event)
    waited = under_way(events, messages)
    span = time_span(events)
    for rank, stages in stages_of(events).items():
        mine = by_rank[rank]
        computed = merged((e.start_s, e.end_s) for e in mine if e.lane == COMPUTE)
        compute_s = total_s(computed)
        lives = _lives(mine, span)
        yield RankStatistics(
            rank=rank,
            stages=stages,
            busy_s=_busy_s(mine),
            compute_s=compute_s,
            bubble=1 - compute_s / compute_span_s if compute_span_s else 0.0,
            exposed_comm_s=outside_s(merged(i for _, i in waited[rank]), computed),
            peak_live=_peak(lives),
            versions=_versions(lives, mine),
        )


def _busy_s(events: Iterable[Event]) -> dict[str, float]:
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append((event.start_s, event.end_s))
    return {kind: total_s(merged(found)) for kind, found in sorted(by_kind.items())}


@dataclass(slots=True)
class _Life:
    """A live microbatch on a stage; ends that are not in the trace lie outside its span."""

    stage: int
    version: int
    start_s: float
    end_s: float
    answered: bool


def _lives(events: Iterable[Event], span: Interval) -> list[_Life]:
    """Return the lives on one rank; `events` come in order of their starts."""
    lives: list[_Life] = []
    newest: dict[tuple[int, int, int], _Life] = {}
    for event in events:
        if event.kind not in (FORWARD, BACKWARD, WEIGHT):
            continue
        key = (event.stage, event.step, event.microbatch)
        goes_forward = event.kind == FORWARD
        # A trace without steps uses a microbatch number again once it has been answered.
        if key not in newest or (goes_forward and newest[key].answered):
            start_s = event.start_s if goes_forward else span[0]
            newest[key] = _Life(event.stage, event.version, start_s, span[1], False)
            lives.append(newest[key])
        if not goes_forward:
            life = newest[key]
            life.end_s = max(life.end_s, event.end_s) if life.answered else event.end_s
            life.answered = True
    return lives


def _peak(lives: Iterable[_Life]) -> int:
    # At the same time, ends come before starts.
    changes = [(life.start_s, 1) for life in lives] + [(life.end_s, -1) for life in lives]
    live = peak = 0
    for _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    return peak


def _versions(lives: Iterable[_Life], events: Iterable[Event]) -> dict[int, int]:
    changes: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    for life in lives:
        if life.version != NONE:
            changes[life.stage].append((life.start_s, 2, life.version))
            changes[life.stage].append((life.end_s, 0, life.version))
    for event in events:
        # The update of step t makes version t + 1: the weights after that many updates.
        if event.kind == UPDATE and event.step != NONE and event.stage in changes:
            changes[event.stage].append((event.end_s, 1, event.step + 1))
    return {stage: _most_versions(found) for stage, found in sorted(changes.items())}


def _most_versions(changes: list[tuple[float, int, int]]) -> int:
    live: Counter[int] = Counter()
    newest, most = NONE, 1
    for _, change, version in sorted(changes):
        if change:
            newest = max(newest, version)
        live[version] += change - 1  # a forward begins: +1, a backward ends: -1
        if not live[version]:
            del live[version]
        most = max(most, len(live) + (newest not in live))
    return most


def _links(messages: Iterable[tuple[Event, Event]], span_s: float) -> Iterable[LinkStatistics]:
    by_link: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for send, receive in messages:
        by_link[send.rank, receive.rank].append(send)
    for (source, target), sends in sorted(by_link.items()):
        busy_s = total_s(merged((send.start_s, send.end_s) for send in sends))
        yield LinkStatistics(
            source=source,
            target=target,
            num_messages=len(sends),
            bytes=sum(send.bytes for send in sends),
            busy_s=busy_s,
            use=busy_s / span_s if span_s else 0.0,
        )


def _axes(events: Iterable[Event]) -> Iterable[AxisStatistics]:
    by_axis: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if is_collective(event):
            by_axis[event.axis].append(event)
    for axis, found in sorted(by_axis.items()):
        yield AxisStatistics(
            axis=axis,
            num_collectives=len(found),
            bytes=sum(event.bytes for event in found),
            seconds=sum(event.duration_s for event in found),
        )
