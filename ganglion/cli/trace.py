"""`ganglion trace`: print where the time of a run or a simulation went, without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ganglion.trace import (
    RECEIVES,
    SENDS,
    CriticalPath,
    Event,
    KindDiff,
    LinkStatistics,
    PlaceDiff,
    RankStatistics,
    TraceDiff,
    TraceStatistics,
    check_suffix,
    critical_path,
    diff_traces,
    event_to_json,
    read_trace,
    summarise,
    time_unit,
    write_trace,
)
from ganglion.units import format_bytes

Format = Callable[[float], str]


def trace_command(path: Path, *, against: Path | None, output: Path | None, as_json: bool) -> None:
    """Print statistics and the critical path of a trace, or how a measured one differs from it.

    `path` is the predicted trace where `against` is given, the measured one. `output` takes the
    trace of `path` in the format of its suffix.
    """
    if output:
        check_suffix(output)
    events = read_trace(path)
    diff = diff_traces(events, read_trace(against)) if against else None
    if as_json:
        print(json.dumps(_as_record(events, diff), indent=2))
    else:
        _print(events, diff)
    if output:
        write_trace(events, output, title=path.resolve().name)
        if not as_json:
            print(f"written: {output}")


def _as_record(events: Sequence[Event], diff: TraceDiff | None) -> dict[str, Any]:
    record = {
        "statistics": asdict(summarise(events)),
        "critical_path": _path_record(critical_path(events)),
    }
    return record | {"diff": _diff_record(diff)} if diff else record


def _path_record(path: CriticalPath) -> dict[str, Any]:
    links = [
        {
            "event": json.loads(event_to_json(link.event)),
            "waiting_s": link.waiting_s,
            "seconds": link.seconds,
        }
        for link in path.links
    ]
    parts = {"seconds": dict(path.seconds), "waiting_s": path.waiting_s, "span_s": path.span_s}
    return {**parts, "links": links}


def _diff_record(diff: TraceDiff) -> dict[str, Any]:
    return {
        "predicted_steps": diff.predicted_steps,
        "measured_steps": diff.measured_steps,
        "kinds": [asdict(one) | {"residual_s": one.residual_s} for one in diff.kinds],
        "places": [asdict(one) | {"largest_cause": one.largest_cause} for one in diff.places],
    }


def _print(events: Sequence[Event], diff: TraceDiff | None) -> None:
    console = Console(highlight=False)
    tables = _diff_tables(diff) if diff else _tables(summarise(events), critical_path(events))
    for heading, table in tables:
        if table.row_count:
            console.print(heading, style="bold")
            console.print(table)
            console.print()


def _tables(found: TraceStatistics, path: CriticalPath) -> Iterable[tuple[str, Table]]:
    shown, unit = _format(found.span_s)
    span = f"{shown(found.span_s)} {unit}"
    yield f"ranks: span {span}, times in {unit}", _rank_table(found.ranks, shown)
    yield f"busy by kind, in {unit}", _busy_table(found.ranks, shown)
    heading = f"messages, times in {unit}"
    if found.num_unmatched:
        heading += f" ({found.num_unmatched} sends and receives without their other end left out)"
    yield heading, _link_table(found.links, shown)
    yield f"collectives, times in {unit}, counted on every rank", _axis_table(found, shown)
    whole = f"{shown(path.span_s)} {unit}"
    yield f"critical path: {len(path.links)} events, {whole}", _path_table(path, shown)


def _format(span_s: float) -> tuple[Format, str]:
    """Return how to show seconds such that this span reads well, and the unit's name."""
    per_s, unit = time_unit(span_s)
    return lambda seconds: _short(seconds * per_s), unit


def _short(value: float) -> str:
    rounded = round(value, 4) + 0.0  # no negative zero
    return f"{rounded:.1f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def _table(*columns: str, num_left: int = 1) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < num_left else "right", no_wrap=True)
    return table


def _rank_table(ranks: Iterable[RankStatistics], shown: Format) -> Table:
    table = _table("rank", "stage", "compute", "bubble", "exposed comm", "peak live", "versions")
    for one in ranks:
        stages = " ".join(map(str, one.stages)) or "-"
        versions = " ".join(map(str, one.versions.values())) or "-"
        times = (shown(one.compute_s), f"{one.bubble:.1%}", shown(one.exposed_comm_s))
        table.add_row(str(one.rank), stages, *times, str(one.peak_live), versions)
    return table


def _busy_table(ranks: Sequence[RankStatistics], shown: Format) -> Table:
    kinds = sorted({kind for one in ranks for kind in one.busy_s} - {*SENDS, *RECEIVES})
    table = _table("rank", *kinds)
    for one in ranks:
        table.add_row(str(one.rank), *(shown(one.busy_s.get(kind, 0.0)) for kind in kinds))
    return table


def _link_table(links: Iterable[LinkStatistics], shown: Format) -> Table:
    table = _table("from -> to", "messages", "size", "busy", "use")
    for one in links:
        size = (str(one.num_messages), format_bytes(one.bytes))
        table.add_row(f"{one.source} -> {one.target}", *size, shown(one.busy_s), f"{one.use:.1%}")
    return table


def _axis_table(found: TraceStatistics, shown: Format) -> Table:
    table = _table("axis", "collectives", "size", "time")
    for one in found.axes:
        size = format_bytes(one.bytes)
        table.add_row(one.axis or "-", str(one.num_collectives), size, shown(one.seconds))
    return table


def _path_table(path: CriticalPath, shown: Format) -> Table:
    table = _table("part", "time", "share")
    longest = sorted(path.seconds.items(), key=lambda part: -part[1])
    for name, seconds in [*longest, ("waiting", path.waiting_s)]:
        share = seconds / path.span_s if path.span_s else 0.0
        table.add_row(name, shown(seconds), f"{share:.1%}")
    return table


def _diff_tables(diff: TraceDiff) -> Iterable[tuple[str, Table]]:
    longest_s = max(s for one in diff.places for s in (one.predicted.span_s, one.measured.span_s))
    shown, unit = _format(longest_s)
    steps = f"{diff.predicted_steps} predicted and {diff.measured_steps} measured steps"
    heading = f"time per step and rank, in {unit}; predicted | measured; {steps}"
    yield heading, _kind_table(diff.kinds, shown)
    heading = f"difference of the span per step, measured - predicted, in {unit}"
    yield heading, _place_table(diff.places, shown)


def _kind_table(kinds: Iterable[KindDiff], shown: Format) -> Table:
    table = _table("where", "kind", "events", "median", "total", "residual", num_left=2)
    for one in kinds:
        sides = (one.predicted, one.measured)
        count = " | ".join(f"{side.count:g}" for side in sides)
        median = " | ".join(shown(side.median_s) for side in sides)
        total = " | ".join(shown(side.total_s) for side in sides)
        table.add_row(str(one.place), one.kind, count, median, total, shown(one.residual_s))
    return table


def _place_table(places: Iterable[PlaceDiff], shown: Format) -> Table:
    columns = ("predicted", "measured", "difference", "compute", "link", "waiting", "mostly")
    table = _table("where", *columns)
    for one in places:
        by = one.difference
        spans = (one.predicted.span_s, one.measured.span_s, by.span_s)
        parts = (by.compute_s, by.link_s, by.waiting_s)
        table.add_row(str(one.place), *map(shown, spans), *map(shown, parts), one.largest_cause)
    return table
