"""`ganglion schedule`: draw pipeline schedules and print their costs, without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ganglion import trace
from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import (
    SCHEDULES,
    RankSchedule,
    ScheduleOptions,
    canonical_schedule,
    make_schedule,
    rehearse,
    stage_map_of,
)
from ganglion.decide.simulator import Simulation, SimulationOptions, simulate, with_default_limit
from ganglion.errors import ConfigError, LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """The options of the command; `times` are those of a rank, before it is cut into chunks."""

    names: tuple[str, ...]
    num_stages: int
    num_microbatches: int
    num_batches: int
    times: StageTimes
    options: ScheduleOptions
    seed: int

    def __post_init__(self) -> None:
        given = {
            "--stages": self.num_stages,
            "--microbatches": self.num_microbatches,
            "--batches": self.num_batches,
        }
        for option, number in given.items():
            if number < 1:
                raise LayoutError(f"{option} {number} leaves nothing to do; use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFigures:
    """The costs of a schedule; `staleness` is how many updates old the weights of a batch are.

    `peak_live` counts microbatches by rank (of several chunks: chunks), `order` has the actions of
    each rank.
    """

    name: str
    makespan_s: float
    bubble: float
    peak_live: list[int]
    versions: int
    staleness: int
    limit: int | None
    order: list[list[str]]


def schedule_command(request: ScheduleRequest, *, svg: Path | None, as_json: bool) -> None:
    """Simulate each schedule asked for; print grids and a table, or JSON."""
    names = list(dict.fromkeys(canonical_schedule(n, "schedule") for n in request.names))
    options = {name: _options(name, names[0], request) for name in names}
    results = {name: _run(name, options[name], request) for name in names}
    figures = [_figures(name, options[name], run, request) for name, run in results.items()]
    if svg is not None:
        _draw(svg, names[0], results[names[0]])
    if as_json:
        records = [asdict(one) for one in figures]
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
        return
    console = Console()
    for name, run in results.items():
        console.print(f"{name}", style="bold")
        for line in trace.render_grid(run.events(), console.width - 6):
            console.print(_coloured(line), no_wrap=True, overflow="crop")
    console.print(_table(figures))


def _options(name: str, first: str, request: ScheduleRequest) -> ScheduleOptions:
    # Options are those of the schedule named first; its rivals run with their defaults.
    given = request.options if name == first else ScheduleOptions()
    times = [request.times] * request.num_stages
    return with_default_limit(name, given, times, request.num_microbatches)


def _run(name: str, options: ScheduleOptions, request: ScheduleRequest) -> Simulation:
    stage_map = stage_map_of(name, request.num_stages, options)
    batches = [request.num_microbatches] * request.num_batches

    def make(rank: int) -> RankSchedule:
        return make_schedule(name, rank, request.num_stages, options)

    if name not in SCHEDULES:  # of the user's own: it might wait for ever
        rehearse(make, request.num_stages, batches, f"schedule = {name!r}")
    times = [request.times.divided(stage_map.num_chunks)] * stage_map.num_stages
    return simulate(make, times, batches, SimulationOptions(seed=request.seed))


def _figures(
    name: str, options: ScheduleOptions, run: Simulation, request: ScheduleRequest
) -> ScheduleFigures:
    first = make_schedule(name, 0, request.num_stages, options)
    first.admit(request.num_microbatches)
    return ScheduleFigures(
        name=name,
        makespan_s=run.makespan_s,
        bubble=run.bubble(),
        peak_live=run.peak_live(),
        versions=run.num_versions(),
        staleness=first.staleness,
        limit=options.limit,
        order=[[str(a) for a in run.order(rank)] for rank in range(request.num_stages)],
    )


def _draw(path: Path, name: str, run: Simulation) -> None:
    if path.suffix != ".svg":
        raise ConfigError(f"--svg {path} does not end in .svg; write --svg {path.stem}.svg")
    trace.write_trace(run.events(), path, title=name)


def _coloured(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(r"(?<=  )\S+", "green")
    text.highlight_regex(r"[A-J](?!.*  )", "magenta")
    text.highlight_regex(r"\d(?!.*  )", "cyan")
    text.highlight_regex(r"\.", "dim")
    return text


def _table(figures: list[ScheduleFigures]) -> Table:
    table = Table()
    for column in ("schedule", "makespan", "bubble", "peak live by rank", "versions", "staleness"):
        table.add_column(column)
    for one in figures:
        live = " ".join(map(str, one.peak_live))
        name = one.name if one.limit is None else f"{one.name} (limit {one.limit})"
        row = (name, f"{one.makespan_s:g} s", f"{one.bubble:.1%}", live)
        table.add_row(*row, str(one.versions), str(one.staleness))
    return table
