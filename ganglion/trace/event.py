"""Trace events, and the recorder that collects those of one rank.

An event is one thing a rank did, or waited for, with when and how many bytes. Real and simulated
runs emit the same record, so a predicted timeline can be compared with a measured one. Times are
seconds on the clock of rank 0 (a rank adds its measured offset).

Recording appends one tuple to one list: no Event is built and nothing is written on the hot path.
(One list per column was measured too: its twelve appends take longer than one tuple.)

    with recorder.span(COMPUTE, "forward", step=3, microbatch=0):
        ...
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json.encoder import encode_basestring_ascii as _quoted
from typing import NamedTuple, TextIO

COMPUTE = "compute"
COMM = "comm"
HOST = "host"
LANES: tuple[str, ...] = (COMPUTE, COMM, HOST)

FORWARD = "forward"
BACKWARD = "backward"
WEIGHT = "weight"
REDUCE = "reduce"
UPDATE = "update"
SENDS = ("send_forward", "send_backward")
RECEIVES = ("receive_forward", "receive_backward")

# The value of a number field without meaning: a reduction has no microbatch, for example.
NONE = -1


class Event(NamedTuple):
    """One interval on one lane of one rank.

    A tuple, because a trace has hundreds of thousands of them. `step` counts updates from 0, so
    events of step 0 lead to the metrics record of step 1.
    """

    rank: int
    lane: str
    kind: str
    start_s: float
    end_s: float
    step: int = NONE
    stage: int = NONE
    block: int = NONE
    microbatch: int = NONE
    version: int = NONE
    axis: str = ""
    bytes: int = 0
    flow: int = NONE

    @property
    def duration_s(self) -> float:
        """The length of the interval."""
        return self.end_s - self.start_s


Clock = Callable[[], float]
# An event without its rank, which is the recorder's.
_Row = tuple[str, str, float, float, int, int, int, int, int, str, int, int]
_OPTIONAL = tuple(Event._field_defaults.items())


class Recorder:
    """Collects the events of one rank and writes them as JSON lines."""

    def __init__(
        self, rank: int, *, enabled: bool = True, clock: Clock = time.perf_counter
    ) -> None:
        """Record for `rank` on `clock`; `offset_s` moves its times onto rank 0's clock."""
        self.rank = rank
        self.enabled = enabled
        self.offset_s = 0.0
        self.step = NONE  # the current update, for callers of `add` that do not know it
        self.clock = clock
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        """Return the number of events not written yet."""
        return len(self._rows)

    def add(
        self,
        lane: str,
        kind: str,
        start_s: float,
        end_s: float,
        *,
        step: int = NONE,
        stage: int = NONE,
        block: int = NONE,
        microbatch: int = NONE,
        version: int = NONE,
        axis: str = "",
        num_bytes: int = 0,
        flow: int = NONE,
    ) -> None:
        """Record one interval, measured on this recorder's clock."""
        if self.enabled:
            self._rows.append(
                (
                    lane,
                    kind,
                    start_s,
                    end_s,
                    step,
                    stage,
                    block,
                    microbatch,
                    version,
                    axis,
                    num_bytes,
                    flow,
                )
            )

    @contextmanager
    def span(
        self, lane: str, kind: str, *, step: int = NONE, microbatch: int = NONE
    ) -> Iterator[None]:
        """Record the time of a `with` block, also when it raises."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(lane, kind, start_s, self.clock(), step=step, microbatch=microbatch)

    def events(self) -> list[Event]:
        """Return the recorded events on rank 0's clock."""
        return [self._event(row) for row in self._rows]

    def drain_to(self, file: TextIO) -> None:
        """Append all events to a file as JSON lines and drop them here."""
        file.writelines(event_to_json(event) + "\n" for event in self.events())
        self._rows.clear()

    def _event(self, row: _Row) -> Event:
        event = Event(self.rank, *row)
        if not self.offset_s:
            return event
        return event._replace(
            start_s=event.start_s + self.offset_s, end_s=event.end_s + self.offset_s
        )


def event_to_json(event: Event) -> str:
    """Return an event as one line of JSON, without fields that have no meaning."""
    # Formatted by hand: a general encoder takes nearly twice as long, and a step waits for it.
    rank, lane, kind, start_s, end_s, *others = event
    found = [
        f'{{"rank": {rank}, "lane": {_quoted(lane)}, "kind": {_quoted(kind)}, '
        f'"start_s": {start_s!r}, "end_s": {end_s!r}'
    ]
    for value, (name, absent) in zip(others, _OPTIONAL, strict=True):
        if value != absent:
            found.append(f'"{name}": {_quoted(value) if isinstance(value, str) else value}')
    return ", ".join(found) + "}"


def is_json(line: str) -> bool:
    """Return whether a line is valid JSON; the last line of a crashed run may not be."""
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True
