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
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from ganglion.trace.event import NONE, Event

Clock = Callable[[], float]
_COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Event) if field.name != "rank")


class Recorder:
    """Collects the events of one rank and writes them as JSON lines."""

    def __init__(
        self, rank: int, *, enabled: bool = True, clock: Clock = time.perf_counter
    ) -> None:
        """Record for `rank` on `clock`; `offset_s` moves its times onto rank 0's clock."""
        self.rank = rank
        self.enabled = enabled
        self.offset_s = 0.0
        self.clock = clock
        self._rows: list[tuple[object, ...]] = []

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
        for event in self.events():
            file.write(event_to_json(event) + "\n")
        self._rows.clear()

    def _event(self, row: tuple[object, ...]) -> Event:
        values = dict(zip(_COLUMNS, row, strict=True))
        for key in ("start_s", "end_s"):
            values[key] = values[key] + self.offset_s  # type: ignore[operator]
        return Event(rank=self.rank, **values)  # type: ignore[arg-type]


def event_to_json(event: Event) -> str:
    """Return one line of JSON that leaves out fields without meaning."""
    record = {field.name: getattr(event, field.name) for field in fields(Event)}
    absent = {field.name: field.default for field in fields(Event)}
    return json.dumps({key: value for key, value in record.items() if value != absent[key]})


def read_events(path: Path) -> list[Event]:
    """Read the events of one file back, in the order written."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Event(**json.loads(line)) for line in lines if line]
