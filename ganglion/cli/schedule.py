"""`ganglion schedule`: draw a pipeline schedule and say what it costs, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ganglion.costs import StageTimes
from ganglion.schedules import ScheduleOptions, canonical_schedule, make_schedule
from ganglion.simulator import Simulation, simulate
from ganglion.trace import render_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What the user typed."""

    names: tuple[str, ...]
    num_stages: int
    num_microbatches: int
    num_batches: int
    times: StageTimes
    options: ScheduleOptions
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFigures:
    """What a schedule costs; `staleness` is how many updates old the weights of a batch are."""

    name: str
    makespan_s: float
    bubble: float
    peak_live: list[int]
    versions: int
    staleness: int
    order: list[list[str]]


def schedule_command(request: ScheduleRequest, *, as_json: bool) -> None:
    """Simulate each schedule asked for; print a grid and a table, or JSON."""
    results = {canonical_schedule(n, "schedule"): _run(n, request) for n in request.names}
    figures = [_figures(name, run, request) for name, run in results.items()]
    if as_json:
        records = [{f: getattr(one, f) for f in ScheduleFigures.__slots__} for one in figures]
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
        return
    console = Console()
    for name, run in results.items():
        console.print(f"{name}", style="bold")
        for line in render_grid(run.events(), console.width - 6):
            console.print(_coloured(line), no_wrap=True, overflow="crop")
    console.print(_table(figures))


def _run(name: str, request: ScheduleRequest) -> Simulation:
    # Options are those of the schedule named first; its rivals run with their defaults.
    options = request.options if name == request.names[0] else ScheduleOptions()
    return simulate(
        lambda stage: make_schedule(name, stage, request.num_stages, options),
        [request.times] * request.num_stages,
        [request.num_microbatches] * request.num_batches,
        seed=request.seed,
    )


def _figures(name: str, run: Simulation, request: ScheduleRequest) -> ScheduleFigures:
    return ScheduleFigures(
        name=name,
        makespan_s=run.makespan_s,
        bubble=run.bubble(),
        peak_live=run.peak_live(),
        versions=run.num_versions(),
        staleness=make_schedule(name, 0, request.num_stages).staleness,
        order=[[str(a) for a in run.order(stage)] for stage in range(request.num_stages)],
    )


def _coloured(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(r"(?<=  )\S+", "green")
    text.highlight_regex(r"\d(?!.*  )", "cyan")
    text.highlight_regex(r"\.", "dim")
    return text


def _table(figures: list[ScheduleFigures]) -> Table:
    table = Table()
    for column in ("schedule", "makespan", "bubble", "peak live by stage", "versions", "staleness"):
        table.add_column(column)
    for one in figures:
        live = " ".join(map(str, one.peak_live))
        row = (one.name, f"{one.makespan_s:g} s", f"{one.bubble:.1%}", live)
        table.add_row(*row, str(one.versions), str(one.staleness))
    return table
