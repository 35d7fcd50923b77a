"""Training what does not fit: optimizer state on disk, and the memory model against real runs.

    python -m benchmarks.memory [--part state|step|largest|predicted|published|all]
                                [--json] [--quick] [--rounds N] [--dir FOLDER]

    state       bytes a parameter of a GPT's state, in memory and with masters and moments on disk
    step        seconds of a step of both, with an update for 1 and for 8 microbatches
    largest     the largest GPT that a process limited to 2 GiB can train, with and without
    predicted   the memory model against the peak of real processes, layout by layout
    published   the memory model against figures of papers

Rows of ratios have `ratio_to`. `bars` says what was aimed at; a quick run does not decide them. The
rates of the disk, below which nothing can be as quick, are among the notes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.bars import make_bars, make_table, tell
from benchmarks.harness import Figures, Row, arguments, machine, measure_figures, spread
from benchmarks.memory.largest import largest
from benchmarks.memory.predicted import (
    FULL,
    LAYOUTS,
    QUICK,
    QUICK_NAMES,
    LayoutFigure,
    measured_layout,
)
from benchmarks.memory.published import published
from benchmarks.memory.task import DISK, RESIDENT, StateTask, contestants, disk_rates
from ganglion.units import GIB, MIB

PARTS = ("state", "step", "largest", "predicted", "published")
LIMIT_BYTES = 2 * GIB
Sides = Mapping[str, Sequence[Sequence[Figures]]]  # by name, then turn, then rank


@dataclass(frozen=True)
class MemoryRow(Row):
    """A row; `predicted` is given in rows of layouts and papers, whose `value` was measured."""

    predicted: float | None = None
    error: float | None = None

    @property
    def most(self) -> float:
        """The value of a row where less is better."""
        return self.value


BARS: dict[tuple[str, str], float] = {
    ("state_resident", "value"): 18.0,
    ("state_offloaded", "most"): 5.0,
    ("state_ratio", "value"): 3.6,
    ("step_ratio_1", "most"): 1.35,
    ("step_ratio_8", "most"): 1.1,
    ("largest_ratio", "value"): 3.5,
    ("predicted_median_error", "most"): 0.08,
    ("predicted_worst_error", "most"): 0.20,
    ("published_worst_error", "most"): 0.10,
}
AT_MOST = ("most",)


@dataclass(frozen=True)
class Size:
    """How large the models of a run of this benchmark are."""

    layers: int
    hidden: int
    vocab_size: int
    seq_len: int
    bucket_size: int
    counts: Sequence[int]
    disk_bytes: int
    narrow: int
    limit_bytes: int
    guesses: Mapping[str, int]

    def task(self, folder: str) -> StateTask:
        return StateTask(
            self.layers, self.hidden, self.vocab_size, self.seq_len, self.bucket_size, folder
        )

    def narrow_task(self, folder: str) -> StateTask:
        """Return a model that grows by little with each layer, and has small activations."""
        return StateTask(1, self.narrow, 4096, 64, self.bucket_size // 4, folder)


SIZES = {
    False: Size(
        layers=12,
        hidden=768,
        vocab_size=16384,
        seq_len=1024,
        bucket_size=2**20,
        counts=(1, 8),
        disk_bytes=1024 * MIB,
        narrow=512,
        limit_bytes=LIMIT_BYTES,
        guesses={RESIDENT: 25, DISK: 100},
    ),
    True: Size(
        layers=2,
        hidden=128,
        vocab_size=512,
        seq_len=32,
        bucket_size=2**13,
        counts=(1, 2),
        disk_bytes=32 * MIB,
        narrow=128,
        limit_bytes=LIMIT_BYTES // 4,
        guesses={RESIDENT: 2, DISK: 3},
    ),
}


# --- state and steps -----------------------------------------------------------------------------


def side_rows(figures: Sides, parts: Sequence[str]) -> list[Row]:
    """Return bytes a parameter, seconds a step, and the ratios of both sides."""
    _check_losses(figures)
    rows: list[Row] = []
    if "state" in parts:
        rows += _state_rows(figures)
    counts = sorted({int(name.rpartition("_")[2]) for name in figures})
    if "step" in parts:
        rows += [row for count in counts for row in _step_rows(figures, count)]
    return rows


def _state_rows(figures: Sides) -> list[Row]:
    """Return the most that either side held in any turn."""
    most = {}
    for name in ("resident", "offloaded"):
        turns = [turns for key, turns in figures.items() if key.startswith(name)]
        most[name] = [turn[0]["state_bytes"] for each in turns for turn in each]
    rows: list[Row] = [
        MemoryRow(f"state_{name}", max(v), "bytes a parameter", min(v), max(v), None, None)
        for name, v in most.items()
    ]
    ratio = max(most["resident"]) / max(most["offloaded"])
    return [*rows, _plain("state_ratio", ratio, "resident / offloaded")]


def _step_rows(figures: Sides, count: int) -> list[Row]:
    taken = {
        name: [turn[0]["step_s"] for turn in figures[f"{name}_{count}"]]
        for name in ("resident", "offloaded")
    }
    rows: list[Row] = [
        MemoryRow(f"step_{name}_{count}", *_in_order("s", spread(v)), None, None)
        for name, v in taken.items()
    ]
    pairs = zip(taken["offloaded"], taken["resident"], strict=True)
    ratios = [offloaded / resident for offloaded, resident in pairs]
    value, low, high = spread(ratios)
    ratio = MemoryRow(f"step_ratio_{count}", value, "offloaded / resident", low, high, None, None)
    return [*rows, ratio]


def _check_losses(figures: Sides) -> None:
    """Refuse to compare trainings that are not equal to the last bit."""
    for name, turns in figures.items():
        if name.startswith("offloaded"):
            peer = figures[name.replace("offloaded", "resident")]
            for mine, theirs in zip(turns, peer, strict=True):
                if mine[0]["last_loss"] != theirs[0]["last_loss"]:
                    raise RuntimeError(f"{name} does not train like its resident twin")


# --- the other parts -----------------------------------------------------------------------------


def largest_rows(size: Size, folder: str) -> list[Row]:
    """Return the parameters of the largest models, in millions, and their ratio."""
    task = size.narrow_task(folder)
    found = {
        name: largest(task, offload, size.limit_bytes, size.guesses[offload])
        for name, offload in (("resident", RESIDENT), ("offloaded", DISK))
    }
    rows = [
        _plain(f"largest_{name}", one.num_parameters / 1e6, "M parameters")
        for name, one in found.items()
    ]
    ratio = found["offloaded"].num_parameters / found["resident"].num_parameters
    return [*rows, _plain("largest_ratio", ratio, "offloaded / resident")]


def predicted_rows(*, quick: bool) -> list[Row]:
    """Return a row for each layout, and the median and the worst of their errors."""
    chosen = [case for case in LAYOUTS if not quick or case.name in QUICK_NAMES]
    found: list[LayoutFigure] = []
    for number, case in enumerate(chosen):
        print(f"predicted: {case.name}, {number + 1} of {len(chosen)}", file=sys.stderr)
        found.append(measured_layout(case, QUICK if quick else FULL))
    errors = [abs(one.error) for one in found]
    return [
        *(_layout_row(one) for one in found),
        _plain("predicted_median_error", statistics.median(errors), "of measured"),
        _plain("predicted_worst_error", max(errors), "of measured"),
    ]


def _layout_row(one: LayoutFigure) -> Row:
    measured = one.measured_bytes / 1e6
    return MemoryRow(
        f"predicted_{one.name}",
        *(measured, "MB", measured, measured, None, None),
        predicted=one.predicted_bytes / 1e6,
        error=one.error,
    )


def published_rows() -> list[Row]:
    """Return a row for each figure of a paper, and the worst error."""
    found = published()
    rows: list[Row] = [
        MemoryRow(
            f"published_{one.name}",
            *(one.theirs, one.unit, one.theirs, one.theirs, None, None),
            predicted=one.ours,
            error=one.ours / one.theirs - 1,
        )
        for one in found
    ]
    return [*rows, _plain("published_worst_error", max(one.error for one in found), "of theirs")]


def _plain(name: str, value: float, unit: str) -> Row:
    return MemoryRow(name, value, unit, value, value, None, None)


def _in_order(unit: str, values: tuple[float, float, float]) -> tuple[float, str, float, float]:
    middle, low, high = values
    return middle, unit, low, high


# --- main ----------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all", help="what to measure")
    parser.add_argument(
        "--dir", default=tempfile.gettempdir(), help="folder of the disk tier; not a tmpfs"
    )


def main() -> None:
    options = arguments("Memory: state on disk, budgets, predictions.", add_options)
    parts = PARTS if options.part == "all" else (options.part,)
    size, rows = SIZES[options.quick], list[Row]()
    rounds = options.rounds or (2 if options.quick else 5)
    notes: dict[str, Any] = {**machine(), "quick": options.quick, "rounds": rounds}
    if {"state", "step", "largest"} & set(parts):
        notes |= disk_rates(Path(options.dir), size.disk_bytes)
    if {"state", "step"} & set(parts):
        counts = size.counts if "step" in parts else size.counts[:1]
        task = size.task(options.dir)
        sides = contestants(counts)
        figures = measure_figures(sides, (task,), rounds, warm_ups=0, title="state and step")
        rows += side_rows(figures, parts)
        count = next(iter(figures.values()))[0][0]["num_parameters"]
        notes["model"] = f"GPT of {count / 1e6:.1f} M parameters"
        notes["tokens_a_microbatch"] = size.seq_len
    if "largest" in parts:
        rows += largest_rows(size, options.dir)
    if "predicted" in parts:
        rows += predicted_rows(quick=options.quick)
    if "published" in parts:
        rows += published_rows()
    bars = make_bars(rows, BARS, AT_MOST)
    tell(rows, bars, notes, [rows_table(rows)], as_json=options.json, at_most=AT_MOST)


def rows_table(rows: Sequence[Row]) -> Table:
    table = make_table("memory", "name", "value", "quartiles", "unit", "model", "error")
    for row in rows:
        assert isinstance(row, MemoryRow)
        table.add_row(
            row.name,
            f"{row.value:.3f}",
            "" if row.low == row.high else f"{row.low:.3f} - {row.high:.3f}",
            row.unit,
            "" if row.predicted is None else f"{row.predicted:.3f}",
            "" if row.error is None else f"{row.error:+.1%}",
        )
    return table


if __name__ == "__main__":
    main()
