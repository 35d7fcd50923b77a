"""Predicted beside measured step times of layouts on this machine.

    python -m benchmarks.planner --json        # profiles the machine first, or --cluster FILE
    python -m benchmarks.planner --quick

A few layouts, marked as seen, correct the profile: their steps decide one factor on computation and
one on the collectives inside layers. The errors of all others say how far a prediction is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bars import Bar, bars_table, make_table
from benchmarks.harness import arguments, machine, spread
from benchmarks.planner.layouts import (
    Layout,
    best_of,
    predicted,
    real_layouts,
    virtual_layouts,
    with_cuts,
)
from benchmarks.planner.runs import WARM_UPS, measured
from ganglion.cli.machines import measured_of, run_ranks
from ganglion.decide.costs import Cluster, find_cluster
from ganglion.decide.predict import fit_cluster, scaled_collectives, scaled_compute
from ganglion.execute.measure import profile_sizes
from ganglion.units import format_time

MEDIAN_BAR, WORST_BAR, BEST_BAR = 0.05, 0.15, 1.02
_ALMOST_FREE = 1e-3
FULL_ROUNDS, QUICK_ROUNDS, FULL_STEPS, QUICK_STEPS = 7, 3, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """A layout: predicted and measured seconds of a step."""

    name: str
    model: str
    seen: bool
    virtual: bool
    predicted_s: float
    measured_s: float
    low_s: float
    high_s: float
    error: float


def main() -> None:
    options = arguments(__doc__ or "", _add)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else FULL_ROUNDS)
    num_steps = options.steps or (QUICK_STEPS if options.quick else FULL_STEPS)
    profiled = _cluster(options)
    layouts = [
        with_cuts(one, profiled)
        for one in (*real_layouts(quick=options.quick), *virtual_layouts(quick=options.quick))
        if not options.only or one.model in options.only
    ]
    times = measured(layouts, profiled, rounds=rounds, num_steps=num_steps)
    cluster, factors = corrected(profiled, layouts, times, num_steps)
    rows = [make_row(one, cluster, profiled, times[one.name], num_steps) for one in layouts]
    notes = {**machine(), "rounds": rounds, "steps": num_steps, "factors": factors}
    _tell(rows, make_bars(rows, layouts), notes, as_json=options.json)


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", default=None, help="a cluster file instead of a profile")
    parser.add_argument("--only", action="append", help="only the layouts of this model")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of a turn")
    parser.add_argument("--keep", type=Path, default=None, help="write the profile to this file")


def _cluster(options: argparse.Namespace) -> Cluster:
    if options.cluster is not None:
        return find_cluster(options.cluster)
    ranks = run_ranks(2, profile_sizes(quick=options.quick, has_device=False))
    fitted = fit_cluster(measured_of(ranks, "this machine"))
    if options.keep is not None:
        options.keep.write_text(fitted.text(), encoding="utf-8")
    return fitted.cluster


def corrected(
    cluster: Cluster,
    layouts: Sequence[Layout],
    times: Mapping[str, Sequence[float]],
    num_steps: int,
) -> tuple[Cluster, dict[str, float]]:
    """Return the cluster as the seen layouts say, and the factors on its numbers.

    Those without tensor axes give one on computation, then the others one on collectives.
    """
    seen = [one for one in layouts if one.seen]
    real_s = {one.name: statistics.median(times[one.name]) for one in seen}

    def planned_s(layout: Layout, on: Cluster) -> float:
        return predicted(layout, on, num_steps + WARM_UPS).step_s

    ratios = [real_s[one.name] / planned_s(one, cluster) for one in seen if not is_split(one)]
    compute = statistics.median(ratios) if ratios else 1.0
    cluster = scaled_compute(cluster, compute)
    free = scaled_collectives(cluster, _ALMOST_FREE)
    ratios = []
    for one in (one for one in seen if is_split(one)):
        alone_s = planned_s(one, free)
        ratios.append((real_s[one.name] - alone_s) / (planned_s(one, cluster) - alone_s))
    # Collectives of no time would say that the factor on computation is too large.
    collectives = max(_ALMOST_FREE, statistics.median(ratios)) if ratios else 1.0
    factors = {"computation": compute, "collectives": collectives}
    return scaled_collectives(cluster, collectives), factors


def is_split(layout: Layout) -> bool:
    """Return whether a layout has collectives inside its layers."""
    return layout.plan.x * layout.plan.y * layout.plan.z > 1


def make_row(
    layout: Layout,
    cluster: Cluster,
    profiled: Cluster,
    times: Sequence[float],
    num_steps: int,
) -> PlannedRow:
    """Compare a layout; stages that sleep sleep as the profile says, so no factor is on them."""
    on = profiled if layout.virtual else cluster
    predicted_s = predicted(layout, on, num_steps + WARM_UPS).step_s
    middle, low, high = spread(times)
    return PlannedRow(
        name=layout.name,
        model=layout.model,
        seen=layout.seen,
        virtual=layout.virtual,
        predicted_s=predicted_s,
        measured_s=middle,
        low_s=low,
        high_s=high,
        error=predicted_s / middle - 1,
    )


def make_bars(rows: Sequence[PlannedRow], layouts: Sequence[Layout]) -> list[Bar]:
    """Return the errors of layouts that the fit has not seen, and the planned best by model."""
    errors = [abs(row.error) for row in rows if not row.seen]
    found = [
        ("unseen layouts", "median error", MEDIAN_BAR, statistics.median(errors)),
        ("unseen layouts", "worst error", WORST_BAR, max(errors)),
    ]
    planned = {row.name: row.predicted_s for row in rows}
    real = {row.name: row.measured_s for row in rows}
    for model in dict.fromkeys(row.model for row in rows):
        chosen, best = (best_of(model, layouts, seconds) for seconds in (planned, real))
        ratio = real[chosen.name] / real[best.name]
        found.append((model, "planned over measured best", BEST_BAR, ratio))
    return [Bar(*one, met=one[3] <= one[2]) for one in found]


def _tell(
    rows: Sequence[PlannedRow], bars: Sequence[Bar], notes: Mapping[str, Any], *, as_json: bool
) -> None:
    if as_json:
        record = {"machine": notes, "rows": [*map(asdict, rows)], "bars": [*map(asdict, bars)]}
        print(json.dumps(record, indent=2))
        return
    columns = ("name", "fit", "predicted", "measured", "quartiles", "error")
    table = make_table("layouts", *columns)
    for row in rows:
        table.add_row(
            row.name,
            "seen" if row.seen else "",
            format_time(row.predicted_s),
            format_time(row.measured_s),
            f"{format_time(row.low_s)} - {format_time(row.high_s)}",
            f"{row.error:+.1%}",
        )
    console = Console(width=max(Console().width, 110))
    console.print(table)
    console.print(bars_table(bars, [bar.measure for bar in bars]))
    console.print(", ".join(f"{key}: {value}" for key, value in notes.items()))


if __name__ == "__main__":
    main()
