"""`ganglion profile --from RUNDIR`: a cluster file refined with the trace of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ganglion.cli.folder import read_folder
from ganglion.cli.machines.written import check_target
from ganglion.decide.costs import cluster_text, find_cluster
from ganglion.decide.predict import Refined, refine
from ganglion.units import format_time


def refine_command(folder: Path, base: str, *, write: Path | None, as_json: bool) -> None:
    """Refine, print what changed and the errors of that run, and write the file if asked."""
    check_target(write)
    cluster = find_cluster(base)
    run, plan = read_folder(folder)
    found = refine(folder, run, plan, cluster)
    if write is not None:
        text = cluster_text(found.cluster, head=_head(found, folder, base))
        write.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps(_record(found, base), indent=2))
        return
    _print(found, base, write)


def _head(found: Refined, folder: Path, base: str) -> list[str]:
    lines = [
        f"{found.cluster.name}, refined by `ganglion profile --from` with the run {folder.name}.",
        "",
        f"Started from {Path(base).name}. What that run's steps took over what was predicted:",
        *(
            f"  {one.group}: x {one.factor:.3g}, the median of {one.num_times}"
            for one in found.changes
        ),
        f"Error of its step: {found.error_before:+.1%} before, {found.error_after:+.1%} after.",
        "Everywhere `_gbps` is gigabits a second: 8 is 1 GB/s.",
    ]
    return lines


def _record(found: Refined, base: str) -> dict[str, object]:
    return {
        "base": base,
        "changes": [asdict(one) for one in found.changes],
        "measured_s": found.measured_s,
        "before_s": found.before_s,
        "after_s": found.after_s,
        "error_before": found.error_before,
        "error_after": found.error_after,
        "compute": found.cluster.compute and asdict(found.cluster.compute),
        "links": {
            name: asdict(link)
            for name, link in (("intra", found.cluster.intra), ("inter", found.cluster.inter))
            if link is not None
        },
    }


def _print(found: Refined, base: str, written: Path | None) -> None:
    console = Console(highlight=False)
    table = Table(title=f"what the run took over what {base} predicts", title_justify="left")
    table.add_column("group")
    table.add_column("factor", justify="right")
    table.add_column("times", justify="right")
    for one in found.changes:
        table.add_row(one.group, f"{one.factor:.3f}", str(one.num_times))
    console.print(table if found.changes else "nothing changes: all times are within 2 %")
    console.print(
        f"step {format_time(found.measured_s)} measured; predicted {format_time(found.before_s)} "
        f"({found.error_before:+.1%}) before, {format_time(found.after_s)} "
        f"({found.error_after:+.1%}) after",
        style="bold",
        soft_wrap=True,
    )
    if written is not None:
        console.print(f"written to {written}: use it as --cluster {written}", markup=False)
