"""A trace as Chrome JSON, which Perfetto and chrome://tracing show: a process per rank.

    rank 0, stage 0 | compute  [F 0][F 1]      [B 0]
                    | comm         [send F 0]--.
    rank 1, stage 1 | comm           [receive F 0]     an arrow from send to receive
                    | compute                     [F 0][B 0]

Perfetto drops a slice that overlaps another one of its thread, so concurrent events of a lane get
threads of their own: `comm`, `comm 2`.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ganglion.trace.event import (
    BACKWARD,
    FORWARD,
    LANES,
    NONE,
    RECEIVES,
    REDUCE,
    SENDS,
    UPDATE,
    WEIGHT,
    Event,
)
from ganglion.trace.statistics import match_messages, stages_of, time_span

# The length of slices that have none: viewers show no slice of length 0 and bind no arrow to it.
MIN_SLICE_NS = 1000

_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHT: "W"}
# Names of colours that the viewers know.
_COLOURS = {
    FORWARD: "thread_state_runnable",
    BACKWARD: "thread_state_iowait",
    WEIGHT: "thread_state_running",
    REDUCE: "thread_state_uninterruptible",
    UPDATE: "yellow",
}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Slice:
    """An event on its thread, in whole nanoseconds from the first event."""

    event: Event
    thread: int
    start_ns: int
    end_ns: int


def chrome_trace(events: Sequence[Event]) -> str:
    """Return the trace as JSON, the same text for the same events in any order."""
    ordered = sorted(events, key=_order)
    slices, names = _threads(ordered)
    timed = [(piece.start_ns, 0, _slice_record(piece)) for piece in slices]
    timed += _arrows(slices)
    timed.sort(key=lambda entry: entry[:2])  # at the same time: the slice before its arrow
    records = [
        record
        for rank, stages in stages_of(ordered).items()
        for record in _named("process", rank, 0, rank_name(rank, stages), rank)
    ]
    records += names + [record for _, _, record in timed]
    lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def sub_lanes(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each interval, sorted by start, the lowest lane where it overlaps no other."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lanes = []
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def event_name(event: Event) -> str:
    """Return a short name: `F 3`, `send B 3`, `reduce`."""
    action, _, what = event.kind.rpartition("_")
    words = [action] if action and what in _LETTERS else []
    words.append(_LETTERS.get(what, what) if words or not action else event.kind)
    if event.microbatch != NONE:
        words.append(str(event.microbatch))
    return " ".join(words)


def rank_name(rank: int, stages: Sequence[int]) -> str:
    """Return `rank 3`, `rank 3, stage 1` or `rank 3, stages 1 5`."""
    if not stages:
        return f"rank {rank}"
    return f"rank {rank}, stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}"


def _order(event: Event) -> tuple[float, float, int, str, str, int, int, int]:
    where = (event.rank, event.lane, event.kind)
    return (event.start_s, event.end_s, *where, event.stage, event.microbatch, event.flow)


def _lane_order(key: tuple[int, str]) -> tuple[int, int, str]:
    rank, lane = key
    return rank, LANES.index(lane) if lane in LANES else len(LANES), lane


def _threads(ordered: Sequence[Event]) -> tuple[list[_Slice], list[Record]]:
    """Return every event on a thread where it overlaps no other, and the names of threads."""
    zero_s = time_span(ordered)[0]
    by_lane: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in ordered:
        by_lane[event.rank, event.lane].append(event)
    slices: list[_Slice] = []
    records: list[Record] = []
    first: dict[int, int] = {}
    for rank, lane in sorted(by_lane, key=_lane_order):
        mine = by_lane[rank, lane]
        times = [_nanoseconds(event, zero_s) for event in mine]
        lanes = sub_lanes(times)
        base = first.get(rank, 1)  # viewers take thread 0 for the idle thread
        slices += [_Slice(e, base + at, *t) for e, at, t in zip(mine, lanes, times, strict=True)]
        first[rank] = base + max(lanes) + 1
        for at in range(max(lanes) + 1):
            name = lane if not at else f"{lane} {at + 1}"
            records += _named("thread", rank, base + at, name, base + at)
    return slices, records


def _nanoseconds(event: Event, zero_s: float) -> tuple[int, int]:
    start_ns, end_ns = round((event.start_s - zero_s) * 1e9), round((event.end_s - zero_s) * 1e9)
    return start_ns, end_ns if end_ns > start_ns else start_ns + MIN_SLICE_NS


def _slice_record(piece: _Slice) -> Record:
    event = piece.event
    record: Record = {
        "ph": "X",
        "name": event_name(event),
        "cat": event.kind,
        "pid": event.rank,
        "tid": piece.thread,
        "ts": piece.start_ns / 1000,
        "dur": (piece.end_ns - piece.start_ns) / 1000,
        "args": _arguments(event),
    }
    if event.kind in _COLOURS:
        record["cname"] = _COLOURS[event.kind]
    return record


def _arguments(event: Event) -> Record:
    numbers = {
        "step": event.step,
        "stage": event.stage,
        "block": event.block,
        "microbatch": event.microbatch,
        "version": event.version,
    }
    found: Record = {key: value for key, value in numbers.items() if value != NONE}
    if event.axis:
        found["axis"] = event.axis
    if event.bytes:
        found["bytes"] = event.bytes
    return found


def _arrows(slices: Sequence[_Slice]) -> list[tuple[int, int, Record]]:
    """Return both ends of each arrow: at the start of its send and at the end of its receive."""
    paired = {receive.flow for _, receive in match_messages(piece.event for piece in slices)}
    entries = []
    for piece in slices:
        event = piece.event
        if event.flow not in paired or event.kind not in SENDS + RECEIVES:
            continue
        where = {"pid": event.rank, "tid": piece.thread, "id": event.flow}
        record: Record = {"name": "message", "cat": "message", **where}
        if event.kind in SENDS:
            entries.append((piece.start_ns, 1, record | {"ph": "s", "ts": piece.start_ns / 1000}))
        else:
            # The last nanosecond: a receive may have been waiting long before the send.
            at_ns = piece.end_ns - 1
            entries.append((at_ns, 2, record | {"ph": "f", "bp": "e", "ts": at_ns / 1000}))
    return entries


def _named(what: str, rank: int, thread: int, name: str, order: int) -> list[Record]:
    """Return the records that name a process or a thread and sort it."""
    arguments = {f"{what}_name": {"name": name}, f"{what}_sort_index": {"sort_index": order}}
    return [
        {"ph": "M", "name": key, "pid": rank, "tid": thread, "args": value}
        for key, value in arguments.items()
    ]
