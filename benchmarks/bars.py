"""Bars: what rows of a benchmark were to reach, and how rows, bars and notes are told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Row

Bars = Mapping[tuple[str, str], float]  # by row and measure


@dataclass(frozen=True)
class Bar:
    """What a row must reach: at least the bar, or at most where less is better."""

    row: str
    measure: str
    bar: float
    measured: float
    met: bool


def make_bars(rows: Sequence[Row], bars: Bars, at_most: Sequence[str] = ()) -> list[Bar]:
    """Compare the rows that were measured with what they must reach; `at_most` names measures."""
    known = {row.name: row for row in rows}
    found = []
    for (name, measure), bar in bars.items():
        if name in known:
            measured = float(getattr(known[name], measure))
            met = measured <= bar if measure in at_most else measured >= bar
            found.append(Bar(name, measure, bar, measured, met))
    return found


def tell(
    rows: Sequence[Row],
    bars: Sequence[Bar],
    notes: Mapping[str, Any],
    tables: Sequence[Table],
    *,
    as_json: bool,
    at_most: Sequence[str] = (),
) -> None:
    """Print everything as JSON, or as tables with the bars and how it was measured."""
    if as_json:
        record = {
            "machine": notes,
            "rows": list(map(asdict, rows)),
            "bars": list(map(asdict, bars)),
        }
        print(json.dumps(record, indent=2))
        return
    console = Console(width=max(Console().width, 130))
    for table in (*tables, bars_table(bars, at_most)):
        console.print(table)
    console.print(", ".join(f"{key}: {value}" for key, value in notes.items()))


def bars_table(bars: Sequence[Bar], at_most: Sequence[str]) -> Table:
    table = make_table("bars", "row", "measure", "bar", "measured", "met")
    for bar in bars:
        sign = "<=" if bar.measure in at_most else ">="
        met = "yes" if bar.met else "NO"
        table.add_row(bar.row, bar.measure, f"{sign} {bar.bar:g}", f"{bar.measured:.3f}", met)
    return table


def make_table(title: str, *columns: str) -> Table:
    """Return an empty table; numbers stand at the right."""
    table = Table(title=title)
    for column in columns:
        left = column in ("name", "row", "measure")
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    return table


def shown(number: float | None, to: str | None = None) -> str:
    """Return a number, or nothing, and what it is a ratio to."""
    return "" if number is None else f"{number:.3f}" + (f" of {to}" if to else "")
