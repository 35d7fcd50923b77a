"""The recorder: events kept as plain tuples while a run is hot, turned into records when it is not.

Recording appends one tuple to one list: no Event is built and nothing is written on the hot path.
(One list a column was measured too: its twelve appends take longer than one tuple.)

    with recorder.span(COMPUTE, "forward", step=3, microbatch=0):
        ...
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import TextIO

from ganglion.trace.event import NONE, Event

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
        self.step = NONE  # the update being worked on, for events whose makers do not know it
        self.clock = clock
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        """Return how many events wait to be written."""
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
        """Record one interval, measured on this recorder's own clock."""
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
        """Record the time a `with` block takes, also when it raises."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(lane, kind, start_s, self.clock(), step=step, microbatch=microbatch)

    def events(self) -> list[Event]:
        """Return what was recorded as events on rank 0's clock."""
        return [self._event(row) for row in self._rows]

    def drain_to(self, file: TextIO) -> None:
        """Append all events to a file as JSON lines and forget them."""
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
    """Return one line of JSON that leaves out fields without meaning."""
    # Put together by hand: a general encoder takes nearly twice as long, and a step waits for it.
    rank, lane, kind, start_s, end_s, *others = event
    found = [
        f'{{"rank": {rank}, "lane": {_quoted(lane)}, "kind": {_quoted(kind)}, '
        f'"start_s": {start_s!r}, "end_s": {end_s!r}'
    ]
    for value, (name, absent) in zip(others, _OPTIONAL, strict=True):
        if value != absent:
            found.append(f'"{name}": {_quoted(value) if isinstance(value, str) else value}')
    return ", ".join(found) + "}"


def read_events(path: Path) -> list[Event]:
    """Read the events of one file back, in the order written."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Event(**json.loads(line)) for line in lines if line]
