"""Pipelines: Ganglion's schedules against those of torch.distributed.pipelining.

    python -m benchmarks.pipeline [--part real|virtual|jitter|all] [--json] [--quick]
                                  [--rounds N] [--steps N] [--ranks N [N ...]]

    real       a GPT on 2 stages, 2 processes with one thread each: tokens/s, more is better
    virtual    stages that sleep, on `--ranks` 4 and 8: seconds a step, less is better
    jitter     the same with a random factor on every computation and a delay on every message

Rows of `real` have the names of schedules; `cpu_s` is the CPU time of all processes in a step,
`first_cut` the block that Ganglion's second stage begins with. Rows of the virtual parts are
`virtual_4_two_bw` and the like, and say beside their seconds

    over_theory          a step over the schedule's own theoretical time
    bare_over_theory     the same of a stage's computations alone, without engine and messages
    closer_than_torch    torch's 1F1B over its theory, over ours: above 1, we are closer
    cost_ms              the CPU time of a computation less that of the bare block: the engine,
                         its messages, and a share of what comes once a step
    lost_ms              what a computation takes longer than in theory, messages included

Whatever the unit, a ratio above 1 means faster than `ratio_to`. `bars` says what was aimed at; a
quick run does not decide them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.bars import make_bars, make_table, shown, tell
from benchmarks.harness import Figures, Row, arguments, machine, measure_figures, spread
from benchmarks.pipeline import real as real_part
from benchmarks.pipeline import virtual as virtual_part
from benchmarks.pipeline.real import RealTask, step_seconds
from benchmarks.pipeline.virtual import DELAY_S, JITTER, Entry, VirtualTask, theoretical_s

PARTS = ("real", "virtual", "jitter")
# What takes long to import: a run has some hundred processes.
PRELOADED = (
    "ganglion.decide.simulator",
    "ganglion.execute.train",
    "rich.table",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)


@dataclass(frozen=True)
class PipelineRow(Row):
    """A row with what is known beside its speed; fields of the other part are None."""

    peer: str | None = None
    ratio_to_peer: float | None = None
    share_of_ideal: float | None = None
    cpu_s: float | None = None
    first_cut: int | None = None
    theoretical_s: float | None = None
    over_theory: float | None = None
    bare_over_theory: float | None = None
    closer_than_torch: float | None = None
    cost_ms: float | None = None
    lost_ms: float | None = None
    cap: int | None = None
    peak_live: int | None = None


AT_MOST = ("over_theory", "cost_ms")
BARS: dict[tuple[str, str], float] = {
    ("two_bw", "share_of_ideal"): 0.97,
    ("two_bw", "ratio"): 1.15,
    ("message_driven", "ratio"): 1.04,
    ("one_f_one_b", "ratio"): 1.04,
    ("interleaved", "ratio_to_peer"): 1.0,
    ("zero_bubble", "ratio_to_peer"): 1.0,
    ("zero_bubble_v", "ratio_to_peer"): 1.0,
}
for _size, _most in ((4, 1.05), (8, 1.06)):
    for _way in ("one_f_one_b", "message_driven", "two_bw"):
        BARS[f"virtual_{_size}_{_way}", "over_theory"] = _most
        BARS[f"virtual_{_size}_{_way}", "closer_than_torch"] = 1.0
        BARS[f"virtual_{_size}_{_way}", "cost_ms"] = 0.5
    BARS[f"jitter_{_size}_message_driven", "ratio"] = 1.10
    BARS[f"jitter_{_size}_two_bw", "ratio"] = 1.25


# --- rows --------------------------------------------------------------------------------------


def real_rows(task: RealTask, rounds: int) -> list[PipelineRow]:
    """Measure the real model: tokens a second."""
    contestants = real_part.CONTESTANTS
    figures = measure_figures(contestants, (task,), rounds, preloaded=PRELOADED, title="real")
    rates = {
        name: [task.tokens / step_seconds(turn) for turn in turns]
        for name, turns in figures.items()
    }
    middle = {name: statistics.median(taken) for name, taken in rates.items()}
    rows = []
    for contestant in contestants:
        name, to = contestant.name, contestant.ratio_to
        value, low, high = spread(rates[name])
        peer = real_part.PEERS.get(name)
        rows.append(
            PipelineRow(
                *(name, value, "tokens/s", low, high),
                ratio_to=to,
                ratio=None if to is None else value / middle[to],
                peer=peer,
                ratio_to_peer=None if peer is None else value / middle[peer],
                share_of_ideal=value / middle["ideal"],
                cpu_s=statistics.median(sum(r["cpu_s"] for r in turn) for turn in figures[name]),
                first_cut=int(figures[name][0][0].get("first_cut", 0)) or None,
            )
        )
    return rows


def virtual_rows(
    part: str, task: VirtualTask, sizes: Sequence[int], rounds: int
) -> list[PipelineRow]:
    """Measure the stages that sleep: seconds a step."""
    if part == "jitter":
        task = replace(task, jitter=JITTER, delay_s=DELAY_S)
    rows: list[PipelineRow] = []
    for num_ranks in sizes:
        entries = virtual_part.entries(part, num_ranks)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            figures = measure_figures(
                [entry.contestant for entry in entries],
                (task, Path(folder)),
                rounds,
                preloaded=PRELOADED,
                title=f"{part}, {num_ranks} ranks",
            )
        seconds = {name: list(map(step_seconds, turns)) for name, turns in figures.items()}
        found = [virtual_row(e, task, seconds, figures[e.contestant.name]) for e in entries]
        rows += _compared(found)
    return rows


def _compared(rows: Sequence[PipelineRow]) -> list[PipelineRow]:
    """Add how far torch, the first row, is from its theory, over how far each one is."""
    overs = [row.over_theory or math.nan for row in rows]
    return [
        replace(row, closer_than_torch=None if row.ratio_to is None else overs[0] / over)
        for row, over in zip(rows, overs, strict=True)
    ]


def virtual_row(
    entry: Entry,
    task: VirtualTask,
    seconds: Mapping[str, Sequence[float]],
    figures: Sequence[Sequence[Figures]],
) -> PipelineRow:
    name, to = entry.contestant.name, entry.contestant.ratio_to
    value, low, high = spread(seconds[name])
    theory_s = theoretical_s(entry, task)
    num_actions = 2 * entry.num_microbatches  # of one rank in a step
    num_in_a_row = 2 * theory_s / (task.forward_s + task.backward_s)
    costs_s = [
        said["cpu_s"] / num_actions - said["bare_cpu_s"] for turn in figures for said in turn
    ]
    return PipelineRow(
        *(name, value, "s", low, high),
        ratio_to=to,
        ratio=None if to is None else statistics.median(seconds[to]) / value,
        theoretical_s=theory_s,
        over_theory=value / theory_s,
        bare_over_theory=None if task.jitter else _median(figures, "bare_over_theory"),
        cost_ms=1e3 * statistics.median(costs_s),
        lost_ms=1e3 * (value - theory_s) / num_in_a_row,
        cap=entry.cap(),
        peak_live=int(max(said["peak_live"] for turn in figures for said in turn)),
    )


def _median(figures: Sequence[Sequence[Figures]], name: str) -> float:
    return statistics.median(said[name] for turn in figures for said in turn)


# --- telling -----------------------------------------------------------------------------------


def tables_of(rows: Sequence[PipelineRow]) -> list[Table]:
    """Return one table for each kind of rows."""
    real = [row for row in rows if row.theoretical_s is None]
    virtual = [row for row in rows if row.theoretical_s is not None]
    return [make(found) for make, found in ((real_table, real), (virtual_table, virtual)) if found]


def real_table(rows: Sequence[PipelineRow]) -> Table:
    table = make_table(
        "real: tokens/s", "name", "median", "quartiles", "ratio", "of ideal", "of peer", "cpu s"
    )
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.0f}",
            f"{row.low:.0f} - {row.high:.0f}",
            shown(row.ratio, row.ratio_to),
            shown(row.share_of_ideal),
            shown(row.ratio_to_peer, row.peer),
            shown(row.cpu_s),
        )
    return table


def virtual_table(rows: Sequence[PipelineRow]) -> Table:
    columns = ("name", "ms a step", "quartiles", "theory", "over it", "bare", "cost_ms", "lost_ms")
    table = make_table("stages that sleep", *columns, "cap", "peak live", "ratio")
    for row in rows:
        table.add_row(
            row.name,
            f"{1e3 * row.value:.1f}",
            f"{1e3 * row.low:.1f} - {1e3 * row.high:.1f}",
            f"{1e3 * (row.theoretical_s or 0):.1f}",
            shown(row.over_theory),
            shown(row.bare_over_theory),
            shown(row.cost_ms),
            shown(row.lost_ms),
            str(row.cap),
            str(row.peak_live),
            "" if row.ratio is None else f"{row.ratio:.3f}",
        )
    return table


def notes_of(real: RealTask, virtual: VirtualTask, rounds: int, quick: bool) -> dict[str, Any]:
    """Say how it was measured."""
    model = real.model
    return {
        **machine(),
        "model": f"GPT {model.layers} layers, hidden {model.hidden}, sequence {model.seq_len}, "
        f"vocabulary {model.vocab_size}, {model.num_microbatches} microbatches of "
        f"{model.microbatch_size}, fp32" + (" (quick: a smaller model)" if quick else ""),
        "virtual": f"forward {1e3 * virtual.forward_s:g} ms, backward "
        f"{1e3 * virtual.backward_s:g} ms, 2 microbatches a rank, messages of "
        f"{4 * virtual_part.NUM_FLOATS >> 10} KB, {virtual.steps} steps a turn",
        "jitter": f"log-normal, sigma {JITTER}; a message is due {1e3 * DELAY_S:g} ms after it "
        f"was sent",
        "rounds": rounds,
        "threads_a_process": 1,
        "quick": quick,
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--steps", type=int, help="steps that a turn times")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="of the virtual parts")


def _tasks(options: argparse.Namespace) -> tuple[RealTask, VirtualTask]:
    real = real_part.QUICK if options.quick else real_part.FULL
    virtual = virtual_part.QUICK if options.quick else virtual_part.FULL
    if options.steps is None:
        return real, virtual
    steps = options.steps
    return replace(real, steps=steps, steady_steps=steps), replace(virtual, steps=steps)


def main() -> None:
    options = arguments(__doc__.splitlines()[0] if __doc__ else "", _add_options)
    rounds = options.rounds or (3 if options.quick else 7)
    real, virtual = _tasks(options)
    rows: list[PipelineRow] = []
    for part in PARTS if options.part == "all" else (options.part,):
        if part == "real":
            rows += real_rows(real, rounds)
        else:
            rows += virtual_rows(part, virtual, options.ranks, rounds)
    bars, notes = make_bars(rows, BARS, AT_MOST), notes_of(real, virtual, rounds, options.quick)
    tell(rows, bars, notes, tables_of(rows), as_json=options.json, at_most=AT_MOST)


if __name__ == "__main__":
    main()
