"""Tensor parallelism: Ganglion's x and z axes against torch's DTensor and FSDP2, and its overlap.

    python -m benchmarks.tensor [--part real|overlap|all] [--json] [--quick]
                                [--rounds N] [--steps N]

    real       a GPT on 2 processes with one thread each: tokens/s, more is better
    overlap    layers that sleep, on 4 ranks under a slow link: seconds a step, less is better

Rows of `real` are `ideal`, `x2`, `z2`, `z2_keep` and their peers `dtensor_tp`, `fsdp2`,
`fsdp2_keep`; all but `ideal` must have the same losses in the first two steps, or nothing is told.
Rows of `overlap` say how much of a step was compute and how much exposed communication, how far
both fell from the row without overlap, and what the paper measured. Whatever the unit, a ratio
above 1 means faster than `ratio_to`. `bars` says what was aimed at; a quick run does not decide
them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from benchmarks.bars import make_bars, make_table, shown, tell
from benchmarks.harness import Figures, Row, arguments, machine, measure_figures, spread
from benchmarks.pipeline.real import step_seconds
from benchmarks.tensor import overlap as overlap_part
from benchmarks.tensor import real as real_part
from benchmarks.tensor.overlap import NONE, WAYS, OverlapTask, Way
from benchmarks.tensor.real import RealTask

PARTS = ("real", "overlap")
OURS = ("x2", "z2", "z2_keep")
# What takes long to import.
PRELOADED = (
    "ganglion.execute.train",
    "rich.table",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


@dataclass(frozen=True)
class TensorRow(Row):
    """A row with what is known beside its speed; fields of the other part are None."""

    share_of_ideal: float | None = None
    cpu_s: float | None = None
    first_loss: float | None = None
    second_loss: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    exposed_fall: float | None = None
    total_fall: float | None = None
    paper_compute_s: float | None = None
    paper_exposed_s: float | None = None


BARS: dict[tuple[str, str], float] = {
    ("x2", "ratio"): 1.4,
    ("z2", "ratio"): 1.4,
    ("z2_keep", "ratio"): 1.05,
    **{(name, "share_of_ideal"): 0.97 for name in OURS},
    (WAYS[-1].name, "exposed_fall"): 0.44,
    (WAYS[-1].name, "total_fall"): 0.18,
}


# --- rows --------------------------------------------------------------------------------------


def real_rows(task: RealTask, rounds: int) -> list[TensorRow]:
    """Measure the real model: tokens a second."""
    contestants = real_part.CONTESTANTS
    # Building a contestant takes two steps, which warm it up.
    figures = measure_figures(
        contestants, (task,), rounds, warm_ups=0, preloaded=PRELOADED, title="real"
    )
    losses = real_part.compared_losses(figures)
    rates = {
        name: [task.tokens / step_seconds(turn) for turn in turns]
        for name, turns in figures.items()
    }
    middle = {name: statistics.median(taken) for name, taken in rates.items()}
    rows = []
    for contestant in contestants:
        name, to = contestant.name, contestant.ratio_to
        value, low, high = spread(rates[name])
        rows.append(
            TensorRow(
                *(name, value, "tokens/s", low, high),
                ratio_to=to,
                ratio=None if to is None else value / middle[to],
                share_of_ideal=value / middle["ideal"],
                cpu_s=statistics.median(sum(r["cpu_s"] for r in turn) for turn in figures[name]),
                first_loss=losses[name][0],
                second_loss=losses[name][1],
            )
        )
    return rows


def overlap_rows(task: OverlapTask, rounds: int) -> list[TensorRow]:
    """Measure the layers that sleep: seconds a step."""
    figures = measure_figures(
        overlap_part.CONTESTANTS, (task,), rounds, preloaded=PRELOADED, title="overlap"
    )
    rows = [overlap_row(way, figures[way.name]) for way in WAYS]
    first = rows[0]
    return [first, *(fallen(row, first) for row in rows[1:])]


def overlap_row(way: Way, turns: Sequence[Sequence[Figures]]) -> TensorRow:
    value, low, high = spread([step_seconds(turn) for turn in turns])
    compute_s = statistics.median(
        statistics.mean(said["compute_s"] for said in turn) for turn in turns
    )
    return TensorRow(
        *(way.name, value, "s", low, high, None, None),
        compute_s=compute_s,
        exposed_s=value - compute_s,
        paper_compute_s=way.paper.compute_s,
        paper_exposed_s=way.paper.exposed_s,
    )


def fallen(row: TensorRow, first: TensorRow) -> TensorRow:
    """Add how far a row is below the one without overlap."""
    assert row.exposed_s is not None and first.exposed_s is not None
    return replace(
        row,
        ratio_to=NONE,
        ratio=first.value / row.value,
        exposed_fall=1 - row.exposed_s / first.exposed_s,
        total_fall=1 - row.value / first.value,
    )


# --- telling -----------------------------------------------------------------------------------


def tables_of(rows: Sequence[TensorRow]) -> list[Table]:
    """Return one table for each part."""
    real = [row for row in rows if row.compute_s is None]
    slept = [row for row in rows if row.compute_s is not None]
    return [make(found) for make, found in ((real_table, real), (overlap_table, slept)) if found]


def real_table(rows: Sequence[TensorRow]) -> Table:
    table = make_table(
        "real: tokens/s", "name", "median", "quartiles", "ratio", "of ideal", "cpu s", "first loss"
    )
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.0f}",
            f"{row.low:.0f} - {row.high:.0f}",
            shown(row.ratio, row.ratio_to),
            shown(row.share_of_ideal),
            shown(row.cpu_s),
            "" if row.first_loss is None else f"{row.first_loss:.6f}",
        )
    return table


def overlap_table(rows: Sequence[TensorRow]) -> Table:
    """Print ours and the paper's, each with its own seconds: the falls are what compares."""
    columns = ("total", "compute", "exposed", "exposed falls", "total falls")
    table = make_table("overlap: s a step", "name", *columns, *(f"paper {c}" for c in columns))
    first = rows[0]
    for row in rows:
        table.add_row(
            row.name,
            *(shown(s) for s in (row.value, row.compute_s, row.exposed_s)),
            *(_percent(fall) for fall in (row.exposed_fall, row.total_fall)),
            *_paper(row, first),
        )
    return table


def _paper(row: TensorRow, first: TensorRow) -> list[str]:
    compute_s, exposed_s = row.paper_compute_s or 0.0, row.paper_exposed_s or 0.0
    first_compute_s, first_exposed_s = first.paper_compute_s or 0.0, first.paper_exposed_s or 0.0
    falls = [
        1 - exposed_s / first_exposed_s,
        1 - (compute_s + exposed_s) / (first_compute_s + first_exposed_s),
    ]
    shown = [f"{compute_s + exposed_s:.2f}", f"{compute_s:.2f}", f"{exposed_s:.2f}"]
    return shown + ["" if row is first else _percent(fall) for fall in falls]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def notes_of(real: RealTask, overlap: OverlapTask, rounds: int, quick: bool) -> dict[str, Any]:
    """Say how it was measured."""
    model = real.model
    return {
        **machine(),
        "model": f"GPT {model.layers} layers, hidden {model.hidden}, sequence {model.seq_len}, "
        f"vocabulary {model.vocab_size}, {model.num_microbatches} microbatches of "
        f"{real_part.NUM_RANKS * model.microbatch_size} sequences over both ranks, fp32, "
        f"{real.steps} steps a turn" + (" (quick: a smaller model)" if quick else ""),
        "overlap": f"x 2, z 2, {overlap.num_layers} layers of hidden {overlap.hidden}, "
        f"{overlap.rows} rows a rank, compute {overlap.compute_s:g} s a step, links of "
        f"{overlap.bytes_per_s / 1e6:.2f} MB/s, {overlap.steps} steps a turn",
        "rounds": rounds,
        "threads_a_process": 1,
        "quick": quick,
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--steps", type=int, help="steps that a turn times")


def _tasks(options: argparse.Namespace) -> tuple[RealTask, OverlapTask]:
    real = real_part.QUICK if options.quick else real_part.FULL
    overlap = overlap_part.QUICK if options.quick else overlap_part.FULL
    if options.steps is None:
        return real, overlap
    return replace(real, steps=options.steps), replace(overlap, steps=options.steps)


def main() -> None:
    options = arguments(__doc__.splitlines()[0] if __doc__ else "", _add_options)
    rounds = options.rounds or (3 if options.quick else 7)
    real, overlap = _tasks(options)
    rows: list[TensorRow] = []
    if options.part in ("real", "all"):
        rows += real_rows(real, rounds)
    if options.part in ("overlap", "all"):
        rows += overlap_rows(overlap, rounds)
    bars, notes = make_bars(rows, BARS), notes_of(real, overlap, rounds, options.quick)
    tell(rows, bars, notes, tables_of(rows), as_json=options.json)


if __name__ == "__main__":
    main()
