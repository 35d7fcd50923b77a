"""A trace as a grid of letters: one row per rank, time to the right.

0  0123a4b5c6d7efgh          digits: forward of that microbatch (last digit)
1  .012a3b4c5d6e7fgh         letters: its backward, a for 0, b for 1; capitals: its weight half
2  ..0a1b2c3d4e5f6g7h        .: idle
"""

from __future__ import annotations

from collections.abc import Sequence

from ganglion.trace.event import COMPUTE, Event

IDLE = "."


def render_grid(events: Sequence[Event], max_columns: int = 100) -> list[str]:
    """Return one line per rank; a column is the shortest computation, or more to fit the width."""
    shown = [event for event in events if event.lane == COMPUTE]
    if not shown:
        return []
    end_s = max(event.end_s for event in shown)
    shortest_s = min(event.duration_s for event in shown if event.duration_s > 0)
    column_s = max(shortest_s, end_s / max_columns)
    num_columns = max(1, round(end_s / column_s))
    ranks = sorted({event.rank for event in shown})
    rows = {rank: [IDLE] * num_columns for rank in ranks}
    for event in shown:
        first, last = round(event.start_s / column_s), round(event.end_s / column_s)
        for column in range(first, min(max(last, first + 1), num_columns)):
            rows[event.rank][column] = _letter(event)
    return [f"{rank:3d}  {''.join(rows[rank])}" for rank in ranks]


def _letter(event: Event) -> str:
    digit = event.microbatch % 10
    if event.kind == "forward":
        return str(digit)
    return ("ABCDEFGHIJ" if event.kind == "weight" else "abcdefghij")[digit]
