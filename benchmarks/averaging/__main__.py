"""Elastic averaging: the paper's methods on a virtual clock, and ours against torch DDP.

    python -m benchmarks.averaging [--part paper|wall|scaling|ddp|torchft|packing|all]
                                   [--json] [--quick] [--rounds N] [--seeds N] [--results FILE]
                                   [--plots FOLDER] [--data FOLDER] [--target A] [--max-batches N]

    paper      LeNet on Fashion-MNIST with 4 workers: virtual seconds to the target accuracy
    wall       the same methods as real processes, with messages at the same price: ms a batch
    scaling    the paper's weak scaling, predicted from its 2-node row; then up to 16,384 nodes
    ddp        Sync EASGD with tau 10 against torch DDP, 2 processes: samples/s and accuracy
    torchft    local SGD and DiLoCo with tau 10 against torchft's, 2 processes, if it is installed
    packing    one message against one for each tensor, 2 processes: exchanges/s

`make averaging-data` installs Fashion-MNIST; `--data` names a folder of MNIST's files instead.
With `--results`, finished trainings of `paper` are kept, and a run goes on where it was; `wall`
takes its prices from there, too, or measures a pass as `paper` does. Whatever the unit, a ratio
above 1 means better than `ratio_to`. Rows of `paper` with the rates of each method end in `_tuned`.
`bars` says what was aimed at; a quick run does not decide them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.averaging import paper as paper_part
from benchmarks.averaging import real as real_part
from benchmarks.averaging import scaling as scaling_part
from benchmarks.averaging import torchft as torchft_part
from benchmarks.averaging import wall as wall_part
from benchmarks.averaging.paper import (
    JITTER,
    ORIGINAL,
    PEERS,
    SHARE,
    SYNC_3,
    Curves,
    PaperRow,
    PaperTask,
)
from benchmarks.averaging.real import EASGD, DdpTask, RealRow
from benchmarks.averaging.scaling import ScalingRow
from benchmarks.averaging.wall import WallRow, WallTask
from benchmarks.bars import Bar, make_bars, make_table, shown, tell
from benchmarks.harness import arguments, machine

PARTS = ("paper", "wall", "scaling", "ddp", "torchft", "packing")
TIE = 0.95  # the share of the first's speed that still ties with it
# Points of efficiency and of accuracy, and shares: the less the better.
AT_MOST = ("communication_share", "difference", "accuracy_behind")
SHARES = {"sync_easgd_1": 0.25, "sync_easgd_2": 0.20, SYNC_3: 0.14}
AnyRow = PaperRow | WallRow | ScalingRow | RealRow
BARS: dict[tuple[str, str], float] = {
    (SYNC_3, "ratio"): 5.3,
    **{(name, "communication_share"): share for name, share in SHARES.items()},
    **{(name + ending, "ratio"): 1.0 for ending in ("", "_tuned") for name in PEERS},
    **{(SYNC_3 + ending, "to_first"): TIE for ending in ("", "_tuned")},
    (SYNC_3 + "_tuned", "ratio"): 5.3,
    **{(f"ring_{nodes}", "difference"): 2.0 for nodes in (4, 8, 16, 32, 64)},
    (EASGD, "ratio"): 1.05,
    (EASGD, "accuracy_behind"): 0.3,
    **{(name, "ratio"): 1.0 for name in torchft_part.PAIRS},
}


# --- telling -----------------------------------------------------------------------------------


def tables_of(rows: Sequence[AnyRow]) -> list[Table]:
    """Return one table for each part."""
    paper = [row for row in rows if isinstance(row, PaperRow)]
    scaling = [row for row in rows if isinstance(row, ScalingRow)]
    real = [row for row in rows if isinstance(row, RealRow)]
    wall = [row for row in rows if isinstance(row, WallRow)]
    tables = [paper_table(paper), breakdown_table(paper)] if paper else []
    tables += [wall_table(wall)] if wall else []
    tables += [scaling_table(scaling)] if scaling else []
    return tables + ([real_table(real)] if real else [])


def paper_table(rows: Sequence[PaperRow]) -> Table:
    columns = ("lr", "reached", "s", "batches", "to original", "throughput", "statistical")
    table = make_table("paper: virtual seconds to the target", "name", *columns, "ratio", "wall s")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.lr:g}",
            f"{row.reached}/{row.seeds}",
            f"{row.value:.3f}",
            f"{row.batches:.0f}",
            *(shown(x) for x in (row.to_original, row.throughput, row.statistical)),
            shown(row.ratio, row.ratio_to),
            f"{row.wall_s:.1f}",
        )
    return table


def breakdown_table(rows: Sequence[PaperRow]) -> Table:
    """Show where the time went; rates do not matter for that."""
    names = list(rows[0].shares)
    table = make_table("paper: % of time", "name", "ms a batch", *names, "communication")
    for row in rows:
        if not row.name.endswith("_tuned"):
            parts = [*(row.shares[name] for name in names), row.communication_share]
            table.add_row(row.name, f"{1e3 * row.batch_s:.3f}", *(f"{100 * p:.1f}" for p in parts))
    return table


def wall_table(rows: Sequence[WallRow]) -> Table:
    columns = ("ms a batch", "quartiles", "simulated", "wall / simulated")
    shares = ("communication %", "simulated %")
    table = make_table("wall", "name", *columns, *shares, "throughput", "simulated", "cpu ms")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.3f}",
            f"{row.low:.3f} - {row.high:.3f}",
            f"{row.simulated:.3f}",
            f"{row.to_simulated:.3f}",
            *(f"{100 * share:.1f}" for share in (row.communication_share, row.simulated_share)),
            *(f"{ratio:.2f}" for ratio in (row.ratio or 1.0, row.simulated_ratio, row.cpu)),
        )
    return table


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    table = make_table("scaling: % efficiency", "name", "nodes", "efficiency", "paper", "apart")
    for row in rows:
        table.add_row(
            row.name, str(row.nodes), f"{row.value:.2f}", shown(row.paper), shown(row.difference)
        )
    return table


def real_table(rows: Sequence[RealRow]) -> Table:
    columns = ("median", "quartiles", "unit", "ratio", "cpu s", "accuracy %", "gap, points")
    table = make_table("two processes", "name", *columns)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.0f}",
            f"{row.low:.0f} - {row.high:.0f}",
            row.unit,
            shown(row.ratio, row.ratio_to),
            shown(row.cpu_s),
            shown(row.accuracy),
            shown(row.accuracy_gap),
        )
    return table


def bars_of(rows: Sequence[AnyRow]) -> list[Bar]:
    """Compare with what was aimed at; two methods that both fail have no ratio, and no bar."""
    told = {
        key: bar
        for key, bar in BARS.items()
        if any(row.name == key[0] and getattr(row, key[1], None) is not None for row in rows)
    }
    return make_bars(rows, told, AT_MOST)  # type: ignore[arg-type]


def notes_of(
    task: PaperTask,
    wall: WallTask,
    curves: Curves | None,
    options: argparse.Namespace,
    rounds: int,
) -> dict[str, Any]:
    """Say how it was measured."""
    notes = {**machine(), "quick": options.quick, "rounds": rounds, "threads_a_process": 1}
    if options.part in ("torchft", "all") and torchft_part.missing():
        notes["torchft"] = torchft_part.missing()
    if curves is None:
        return notes
    costs = curves.costs
    assert isinstance(costs.pass_s, float)
    return {
        **notes,
        "paper": f"LeNet, {task.num_workers} workers, batches of {task.batch_size}, beta "
        f"{task.beta:g}, target {task.target:g} on {task.num_held_out} held-out images, at most "
        f"{task.max_batches} batches, {task.seeds} seeds, rates {list(task.lrs)}, Sync SGD sums",
        "clock": f"pass {1e3 * costs.pass_s:.3f} ms +- {100 * JITTER:g} %, updates "
        f"{1e3 * costs.update_s:.3f} and {1e3 * costs.host_center_s:.3f} ms, message "
        f"{1e3 * costs.host_link.message_s:.4f} ms and {1e9 * costs.host_link.byte_s:.4f} ns a "
        f"byte: {ORIGINAL} communicates {100 * SHARE:.0f} %",
        "wall": f"passes and messages times {wall.pass_s / costs.pass_s:.3f}, {wall.steps} steps "
        f"a worker and round",
    }


# --- main ----------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part",
        choices=(*PARTS, "all"),
        default="all",
        help="`paper` is on a virtual clock, `wall` on real processes with slow links (2 minutes)",
    )
    parser.add_argument("--seeds", type=int, help="paired seeds of `paper` (default 3, quick 1)")
    parser.add_argument("--results", type=Path, help="keeps finished trainings of `paper`")
    parser.add_argument("--plots", type=Path, help="folder for PNG pictures of `paper`")
    parser.add_argument("--data", help="folder of MNIST's files, instead of Fashion-MNIST")
    parser.add_argument("--target", type=float, help="accuracy to reach in `paper`, 0 to 1")
    parser.add_argument("--max-batches", type=int, help="of one training of `paper`")
    parser.add_argument("--steps", type=int, help="of one training of `ddp`")


def _ddp_task(options: argparse.Namespace) -> DdpTask:
    task = real_part.QUICK_DDP if options.quick else real_part.FULL_DDP
    steps = task.steps if options.steps is None else options.steps
    return replace(task, steps=steps, source=options.data or task.source)


def _paper_task(options: argparse.Namespace) -> PaperTask:
    task = paper_part.QUICK if options.quick else paper_part.FULL
    wishes = {
        "seeds": options.seeds,
        "source": options.data,
        "target": options.target,
        "max_batches": options.max_batches,
    }
    task = replace(task, **{key: wish for key, wish in wishes.items() if wish is not None})
    # Synchronous workers share the batches evenly.
    whole = math.ceil(task.max_batches / task.num_workers) * task.num_workers
    watch_every = min(task.watch_every, max(task.num_workers, whole // 8))
    return replace(task, max_batches=whole, watch_every=watch_every)


def main() -> None:
    options = arguments(__doc__.splitlines()[0] if __doc__ else "", _add_options)
    rounds = options.rounds or (3 if options.quick else 5)
    parts = PARTS if options.part == "all" else (options.part,)
    task = _paper_task(options)
    rows: list[AnyRow] = []
    curves = None
    if "paper" in parts:
        found, curves = paper_part.paper_rows(task, options.results)
        rows += found
        if options.plots:
            from benchmarks.averaging.plots import draw  # needs the extra `plot`

            draw(found, curves, options.plots)
    wall = wall_part.QUICK if options.quick else wall_part.FULL
    if "wall" in parts:
        torch.set_num_threads(1)  # a pass is timed
        curves = curves or Curves(task, options.results)
        rows += wall_part.wall_rows(wall, curves.costs, rounds)
    if "scaling" in parts:
        rows += scaling_part.scaling_rows()
    if "ddp" in parts:
        rows += real_part.ddp_rows(_ddp_task(options), rounds)
    if "torchft" in parts:
        rows += torchft_part.torchft_rows(_ddp_task(options), rounds)
    if "packing" in parts:
        packing = real_part.QUICK_PACKING if options.quick else real_part.FULL_PACKING
        rows += real_part.packing_rows(packing, rounds)
    notes = notes_of(task, wall, curves, options, rounds)
    # The rows share the fields that the harness knows.
    tell(rows, bars_of(rows), notes, tables_of(rows), as_json=options.json, at_most=AT_MOST)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
