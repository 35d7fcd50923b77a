"""`ganglion memory`: print the memory of every rank of a run, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ganglion.cli.overrides import Overrides
from ganglion.cli.train import TrainOptions, fitted_plan
from ganglion.decide.config import Override, RunFile, own_code_key
from ganglion.decide.costs import Cluster, find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import (
    MemoryFigures,
    MemoryRow,
    num_cluster_ranks,
    predict_memory,
    read_source,
)
from ganglion.decide.topology import Launch
from ganglion.errors import ConfigError
from ganglion.units import MIB, format_bytes

# The letter of each category in the picture, and its heading in the table.
_SHOWN = {
    "weights": ("W", "weights"),
    "versions": ("V", "versions"),
    "gradients": ("G", "grads"),
    "master": ("F", "master"),
    "moments": ("M", "moments"),
    "center": ("E", "center"),
    "buckets": ("B", "buckets"),
    "activations": ("A", "live"),
    "recomputed": ("R", "again"),
    "communication": ("C", "comm"),
    "scratch": ("S", "scratch"),
}
_PICTURE_WIDTH = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """The options of the command."""

    file: Path
    cluster: str | None
    nproc: int | None
    plan_file: Path | None
    overrides: Overrides


def memory_command(request: MemoryRequest, *, as_json: bool) -> int:
    """Print the memory of ranks as a table and a picture, or JSON; return 1 if it does not fit."""
    cluster = None if request.cluster is None else find_cluster(request.cluster)
    run, plan = _run_and_plan(request, cluster, is_told=not as_json)
    figures = predict_memory(run, plan, cluster)
    if as_json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        _print(figures, run, plan, cluster)
    return 1 if figures.fits is False else 0


def _run_and_plan(
    request: MemoryRequest, cluster: Cluster | None, *, is_told: bool
) -> tuple[RunFile, Plan]:
    run = read_source(request.file, [Override(*pair) for pair in request.overrides])
    if isinstance(run, Plan):
        raise ConfigError(
            f"{request.file} is a plan, which does not say how large the model is: give the run "
            f"file, and the plan as --plan {request.file}"
        )
    key = own_code_key(run)
    if key is not None:
        raise ConfigError(
            f"{request.file}: {key} is code of your own, whose size cannot be known before it "
            f"runs: describe it with `ganglion describe {request.file}`, and set model.description"
        )
    options = TrainOptions(
        run_file=request.file,
        nproc=request.nproc,
        plan_file=request.plan_file,
        overrides=request.overrides,
        log_level="warning",
    )
    if cluster is not None and request.nproc is None and request.plan_file is None:
        options = replace(options, nproc=num_cluster_ranks(run, cluster))
    return fitted_plan(options, run, Launch(), is_told=is_told)


# --- for people ----------------------------------------------------------------------------------


def _print(figures: MemoryFigures, run: RunFile, plan: Plan, cluster: Cluster | None) -> None:
    console = Console(highlight=False)
    where = "" if cluster is None else f" on {cluster.name}"
    console.print(
        f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}{where}: data {plan.data}, pipe "
        f"{plan.pipe}, x {plan.x}, y {plan.y}, z {plan.z}; {plan.schedule}, "
        f"{plan.num_microbatches} x {plan.microbatch_size} samples a step, {plan.precision}, "
        f"{run.optimizer.name}, recompute {_recomputed(plan)}",
        soft_wrap=True,
    )
    console.print(_table(figures))
    for line in _picture(figures):
        console.print(line, markup=False)
    console.print(_verdict(figures, run, plan, cluster), soft_wrap=True)


def _recomputed(plan: Plan) -> str:
    every = f" every {plan.recompute_every}" if plan.recompute_every > 1 else ""
    blocks = ", ".join(plan.recompute_blocks)
    moved = plan.offload_activations
    return f"{plan.recompute}{every}{' ' * bool(blocks)}{blocks}" + (
        f", activations on {moved}" if moved != "none" else ""
    )


def _present(figures: MemoryFigures) -> list[str]:
    """Return the categories that some rank has."""
    return [name for name in _SHOWN if any(row.bytes[name] for row in figures.rows)]


def _table(figures: MemoryFigures) -> Table:
    names = _present(figures)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("ranks", no_wrap=True)
    for name in names:
        table.add_column(_SHOWN[name][1], justify="right", no_wrap=True)
    table.add_column("MiB", justify="right", style="bold", no_wrap=True)
    for row in figures.rows:
        cells = [_mebibytes(row.bytes[name]) for name in names]
        table.add_row(_spans(row.ranks), *cells, _mebibytes(row.total_bytes))
    return table


def _mebibytes(num_bytes: int) -> str:
    value = num_bytes / MIB
    if num_bytes == 0:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _spans(numbers: Iterable[int]) -> str:
    """Return numbers with runs folded: `0-3, 8`."""
    ordered = sorted(numbers)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b > a + 1), ordered[-1]]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _picture(figures: MemoryFigures) -> list[str]:
    """Return a bar of letters for each row, with the budget if there is one, and a legend."""
    budget = figures.budget_bytes
    longest = max(figures.worst.total_bytes, budget or 0)
    labels = [_spans(row.ranks) for row in figures.rows]
    indent = max(map(len, labels))
    lines = []
    for label, row in zip(labels, figures.rows, strict=True):
        bar = _bar(row, longest)
        if budget is not None:
            limit = round(budget / longest * _PICTURE_WIDTH)
            bar = f"{bar:.<{limit}}"
            bar = f"{bar[:limit]}|{bar[limit:]}"
        lines.append(f"{label:<{indent}}  {bar}  {format_bytes(row.total_bytes)}")
    legend = [f"{_SHOWN[name][0]}={name}" for name in _present(figures)]
    if budget is not None:
        legend.append(f"|={figures.budget_key}")
    return ["", *lines, " ".join(legend), ""]


def _bar(row: MemoryRow, longest: int) -> str:
    """Return letters in proportion; rounded at the ends of categories, so that none drifts."""
    bar, done = "", 0
    for name, (letter, _) in _SHOWN.items():
        done += row.bytes[name]
        bar += letter * (round(done / longest * _PICTURE_WIDTH) - len(bar))
    return bar


def _verdict(figures: MemoryFigures, run: RunFile, plan: Plan, cluster: Cluster | None) -> str:
    worst = figures.worst
    who = f"rank {worst.ranks[0]}" if len(worst.ranks) == 1 else f"ranks {_spans(worst.ranks)}"
    needs = f"{who} need{'s' if len(worst.ranks) == 1 else ''} {format_bytes(worst.total_bytes)}"
    if run.memory.device_gib > 0:
        has = f"memory.device_gib = {run.memory.device_gib:g}"
    elif cluster is None:
        return f"most: {needs}; --cluster FILE says whether that fits, memory.device_gib makes it"
    elif figures.budget_bytes is None:
        return f"most: {needs}; {cluster.source} has no compute.memory_gib to compare with"
    else:
        has = f"compute.memory_gib = {format_bytes(figures.budget_bytes)} of {cluster.source}"
    if figures.fits:
        return f"fits: {needs} at most, of {has}"
    assert figures.budget_bytes is not None, "nothing else is refused"
    over = format_bytes(worst.total_bytes - figures.budget_bytes)
    return f"does not fit: {needs}, {over} more than {has}: {_remedy(figures, run, plan, cluster)}"


def _remedy(figures: MemoryFigures, run: RunFile, plan: Plan, cluster: Cluster | None) -> str:
    """Return the one change that helps most: recomputation, or a smaller share of the model."""
    if plan.recompute == "none":
        again = predict_memory(run, replace(plan, recompute="full"), cluster)
        if again.fits:
            lower = format_bytes(again.worst.total_bytes)
            return f'set memory.recompute = "full", which needs {lower}'
    bytes_ = figures.worst.bytes
    if bytes_["activations"] + bytes_["recomputed"] > figures.worst.total_bytes / 2:
        return "lower train.microbatch_size, or raise parallel.pipe or x"
    return "raise parallel.pipe, x, y or z, so that a rank holds less of the model"
