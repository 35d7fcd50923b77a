"""The critical path: the chain of events that made a trace as long as it is.

From the event that ends last we walk back, each time to the predecessor that ended last:

    forward     the message that brought its input, the update that made its weights
    backward    the message that brought its gradient, and its forward
    weight      its backward
    send        the computation whose result it carries        receive   its send
    reduce      the backward or weight before it or around it, and the collective before it
    update      its reductions, or the last backward where there are none

and on the compute and host lanes the event before on the same rank. The gap between an event and
its predecessor is waiting. A receive counts from the end of its send, when the message is on its
way. A reduction may start in the middle of a backward: then the backward counts up to there.

Collectives of several ranks are not connected: a trace does not contain their members.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ganglion.trace.event import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    HOST,
    NONE,
    RECEIVES,
    REDUCE,
    SENDS,
    UPDATE,
    WEIGHT,
    Event,
)
from ganglion.trace.statistics import is_collective, match_messages, time_span

_COLLECTIVE = "any collective"
_VERSION = "made version"
_INPUTS = {FORWARD: "receive_forward", BACKWARD: "receive_backward"}
_RESULTS = dict(zip(SENDS, (FORWARD, BACKWARD), strict=True))

Key = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class PathLink:
    """An event of the path: after `waiting_s`, `seconds` of it are on the path."""

    event: Event
    waiting_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The path in time order; `seconds` by kind and `waiting_s` add up to `span_s`.

    `span_s` runs from the start of the first link to the end of the last.
    """

    links: tuple[PathLink, ...]
    seconds: Mapping[str, float]
    waiting_s: float
    span_s: float


def critical_path(events: Sequence[Event]) -> CriticalPath:
    """Return the critical path of a trace; raise DataError if it is empty."""
    time_span(events)
    links = tuple(reversed(list(_walk(events))))
    seconds: dict[str, float] = defaultdict(float)
    for link in links:
        seconds[link.event.kind] += link.seconds
    waiting_s = sum(link.waiting_s for link in links)
    return CriticalPath(
        links=links,
        seconds=dict(sorted(seconds.items())),
        waiting_s=waiting_s,
        span_s=waiting_s + sum(seconds.values()),
    )


def _walk(events: Sequence[Event]) -> Iterator[PathLink]:
    """Yield the links from the last to the first."""
    causes = _Causes(events)
    # Of those that end last, the longest: messages of no length end together with their cause.
    event = max(events, key=lambda e: (e.end_s, e.duration_s, -e.rank))
    at_s = event.end_s
    while True:
        end_s = min(event.end_s, at_s)
        at_s = min(causes.start_s(event), end_s)
        before = causes.last_before(event, at_s)
        waiting_s = at_s - min(before.end_s, at_s) if before else 0.0
        yield PathLink(event, waiting_s, end_s - at_s)
        if before is None:
            return
        event = before


class _Causes:
    """Finds the events that an event waited for; each is returned once, so every walk ends."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._sends = {receive.flow: send for send, receive in match_messages(events)}
        self._ended = _index((key, event.end_s, event) for event in events for key in _keys(event))
        made_gradients = [event for event in events if event.kind in (BACKWARD, WEIGHT)]
        self._started = _index(
            (key, event.start_s, event) for event in made_gradients for key in _keys(event)
        )
        self._seen: set[int] = set()

    def start_s(self, event: Event) -> float:
        """Return the time from which an event counts."""
        send = self._sends.get(event.flow) if event.kind in RECEIVES else None
        return send.end_s if send else event.start_s

    def last_before(self, event: Event, at_s: float) -> Event | None:
        """Return the predecessor that ended last; among equals, the one on the event's lane."""
        self._seen.add(id(event))
        found = [cause for cause in self._of(event) if cause and id(cause) not in self._seen]
        return max(found, key=lambda cause: min(cause.end_s, at_s), default=None)

    def _of(self, event: Event) -> list[Event | None]:
        if event.kind in RECEIVES:
            return [self._sends.get(event.flow)]
        if event.kind in SENDS:
            result = self._same(_RESULTS[event.kind], event)
            return [result or self._last((event.rank, COMPUTE), event)]
        if is_collective(event):
            return self._before_collective(event)
        return self._before_on_rank(event) + self._needed(event)

    def _before_collective(self, event: Event) -> list[Event | None]:
        previous = self._last((event.rank, _COLLECTIVE), event)
        if event.kind != REDUCE:
            return [self._last((event.rank, COMPUTE), event), previous]
        around = [self._of_stage(kind, event, self._started) for kind in (BACKWARD, WEIGHT)]
        return [*around, previous]

    def _before_on_rank(self, event: Event) -> list[Event | None]:
        """Return the events before on the same rank, of lanes that run one after the other."""
        if event.lane == COMPUTE:
            lanes: tuple[str, ...] = (COMPUTE, HOST)
        elif event.kind == UPDATE:  # beside the compute lane
            lanes = (HOST, UPDATE)
        else:
            lanes = (HOST, UPDATE, COMPUTE, _COLLECTIVE)
        return [self._last((event.rank, lane), event) for lane in lanes]

    def _needed(self, event: Event) -> list[Event | None]:
        if event.kind == FORWARD:
            return [self._same(_INPUTS[FORWARD], event), self._weights(event)]
        if event.kind == BACKWARD:
            return [self._same(_INPUTS[BACKWARD], event), self._same(FORWARD, event)]
        if event.kind == WEIGHT:
            return [self._same(BACKWARD, event)]
        if event.kind == UPDATE:
            return self._gradients(event)
        return []

    def _gradients(self, event: Event) -> list[Event | None]:
        """Return the events that made the gradients of an update: reductions, or backwards."""
        for kinds in ((REDUCE,), (BACKWARD, WEIGHT)):
            found = [self._of_stage(kind, event, self._ended) for kind in kinds]
            if any(found):
                return found
        return [self._last((event.rank, COMPUTE), event)]

    def _weights(self, event: Event) -> Event | None:
        """Return the update that made the weights of a forward, not always the last one."""
        if event.version == NONE:
            return self._of_stage(UPDATE, event, self._ended)
        return self._last((event.rank, _VERSION, event.stage, event.version), event)

    def _same(self, kind: str, event: Event) -> Event | None:
        """Return the last event of a kind for the same stage and microbatch."""
        return self._last((event.rank, kind, event.stage, event.microbatch), event)

    def _of_stage(self, kind: str, event: Event, index: _Index) -> Event | None:
        """Return the last event of a kind for the same stage, or for no stage."""
        staged = index.get((event.rank, kind, event.stage, NONE))
        found = staged or index.get((event.rank, kind, NONE, NONE))
        return found.last(event.start_s, self._seen) if found else None

    def _last(self, key: Key, event: Event) -> Event | None:
        found = self._ended.get(key)
        return found.last(event.start_s, self._seen) if found else None


class _Row:
    """Events sorted by start or by end."""

    def __init__(self, timed: list[tuple[float, Event]]) -> None:
        timed.sort(key=lambda pair: pair[0])
        self._times = [time_s for time_s, _ in timed]
        self._events = [event for _, event in timed]

    def last(self, time_s: float, seen: set[int]) -> Event | None:
        """Return the last event up to `time_s` that is not in `seen`."""
        at = bisect_right(self._times, time_s)
        while at and id(self._events[at - 1]) in seen:
            at -= 1
        return self._events[at - 1] if at else None


_Index = dict[Key, _Row]


def _index(entries: Iterable[tuple[Key, float, Event]]) -> _Index:
    rows: dict[Key, list[tuple[float, Event]]] = defaultdict(list)
    for key, time_s, event in entries:
        rows[key].append((time_s, event))
    return {key: _Row(timed) for key, timed in rows.items()}


def _keys(event: Event) -> Iterator[Key]:
    """Yield all keys of an event."""
    rank, kind, stage = event.rank, event.kind, event.stage
    yield rank, kind, stage, event.microbatch
    if event.microbatch != NONE:
        yield rank, kind, stage, NONE
    if stage != NONE:
        yield rank, kind, NONE, NONE
    if kind == UPDATE:
        yield rank, UPDATE
        yield rank, _VERSION, stage, event.step + 1  # version: the number of updates made
    if is_collective(event):
        yield rank, _COLLECTIVE
    if event.lane == COMPUTE or (event.lane == HOST and kind != UPDATE):
        yield rank, event.lane
