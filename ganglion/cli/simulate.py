"""`ganglion simulate`: run a plan on a virtual cluster and print how long a step takes, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ganglion import trace
from ganglion.cli.overrides import Overrides
from ganglion.decide.config import AveragingSection, Override
from ganglion.decide.costs import find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import (
    StepFigures,
    StepSetting,
    planned_run,
    planned_times,
    predict_step,
    read_source,
)
from ganglion.decide.simulator import Disturbance
from ganglion.decide.simulator.averaging import AveragingFigures
from ganglion.errors import ConfigError, LayoutError
from ganglion.units import format_bytes, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """The options of the command."""

    file: Path
    cluster: str
    nproc: int | None
    steps: int
    pauses: Sequence[str]
    slow: Sequence[str]
    seed: int
    overrides: Overrides = ()


def simulate_command(request: SimulateRequest, *, trace_file: Path | None, as_json: bool) -> None:
    """Simulate, print figures as a table or JSON, and write the trace if asked."""
    cluster = find_cluster(request.cluster)
    source = read_source(request.file, [Override(*pair) for pair in request.overrides])
    name = str(request.file)
    run, plan = planned_run(source, cluster, request.nproc, name, fits_budget=False)
    times = planned_times(plan, cluster, run, name)
    plan.require_built()
    setting = StepSetting(
        num_steps=request.steps,
        disturbances=_disturbances(request, plan),
        seed=request.seed,
        averaging=AveragingSection() if run is None else run.averaging,
    )
    figures, events = predict_step(plan, times, cluster, setting)
    if trace_file is not None:
        trace.write_trace(events, trace_file, title=f"{request.file.stem} on {cluster.name}")
    if as_json:
        print(json.dumps(asdict(figures), indent=2))
        return
    _print(figures, plan, cluster.name, trace_file)


def _disturbances(request: SimulateRequest, plan: Plan) -> tuple[Disturbance, ...]:
    """Read RANK:START:LENGTH and RANK:FACTOR[:START:LENGTH]."""
    found = []
    for text in request.pauses:
        rank, start_s, length_s = _numbers("--pause", text, "RANK:START:LENGTH", (3,))
        end_s = start_s + length_s
        place = _place(int(rank), plan)
        found.append(Disturbance(rank=place, speed=0.0, start_s=start_s, end_s=end_s))
    for text in request.slow:
        numbers = _numbers("--slow", text, "RANK:FACTOR or RANK:FACTOR:START:LENGTH", (2, 4))
        start_s, length_s = numbers[2:] or (0.0, math.inf)
        if numbers[1] <= 0:
            raise ConfigError(f"--slow {text}: a factor of {numbers[1]:g} is no slowdown; use 2")
        found.append(
            Disturbance(
                rank=_place(int(numbers[0]), plan),
                speed=1 / numbers[1],
                start_s=start_s,
                end_s=start_s + length_s,
            )
        )
    return tuple(found)


def _numbers(option: str, text: str, form: str, counts: tuple[int, ...]) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in counts or not numbers[0].is_integer():
        raise ConfigError(f"{option} {text} is not {form}, as in {option} 1:2.5:4")
    return numbers


def _place(rank: int, plan: Plan) -> int:
    """Return the simulated rank that stands for a rank of the plan."""
    if not 0 <= rank < plan.mesh().num_ranks:
        last = plan.mesh().num_ranks - 1
        raise LayoutError(f"rank {rank} is none of the plan's ranks 0 to {last} that compute")
    at = plan.mesh().coordinates(rank)
    return at.data * plan.pipe + at.pipe


def _print(figures: StepFigures, plan: Plan, cluster: str, trace_file: Path | None) -> None:
    console = Console(highlight=False)
    limit = "" if figures.limit is None else f" (limit {figures.limit})"
    ranks, count = figures.num_ranks, plan.num_microbatches
    console.print(
        f"{ranks} rank{_s(ranks)} on {cluster}: data {plan.data}, pipe {plan.pipe}, x "
        f"{plan.x}, y {plan.y}, z {plan.z}; {figures.schedule}{limit}, {count} "
        f"microbatch{'es' if count > 1 else ''} of {plan.microbatch_size}",
        soft_wrap=True,
    )
    per_s = plan.global_batch_size / figures.step_s if figures.step_s else 0.0
    console.print(
        f"step {format_time(figures.step_s)}, {per_s:.4g} samples/s, bubble {figures.bubble:.1%}, "
        f"{figures.versions} weight version{_s(figures.versions)}",
        style="bold",
    )
    table = Table()
    columns = ("forward", "backward", "in layers", "message", "reduce", "idle", "exposed", "live")
    for column in ("pipe", *columns):
        table.add_column(column, justify="right")
    for rank in range(plan.pipe):
        table.add_row(
            str(rank),
            format_time(figures.forward_s[rank]),
            format_time(figures.backward_s[rank]),
            format_time(figures.collective_s[rank]),
            format_bytes(figures.message_bytes[rank]),
            format_time(figures.reduce_s[rank]),
            f"{figures.bubbles[rank]:.1%}",
            format_time(figures.exposed_comm_s[rank]),
            str(figures.peak_live[rank]),
        )
    console.print(table)
    if figures.averaging is not None:
        _print_averaging(console, figures.averaging)
    if trace_file is not None:
        console.print(f"trace written to {trace_file}")


def _print_averaging(console: Console, found: AveragingFigures) -> None:
    served = f", {found.servers} server{_s(found.servers)}" if found.servers else ""
    console.print(
        f"{found.method}, {found.num_workers} worker{_s(found.num_workers)}{served}: an exchange "
        f"of {format_bytes(found.exchange_bytes)} takes {format_time(found.exchange_s)} every "
        f"{found.tau} step{_s(found.tau)}, {format_time(found.exposed_s)} of it exposed "
        f"({found.exposed_share:.1%} of all time); a step without: "
        f"{format_time(found.worker_step_s)}",
        soft_wrap=True,
    )
    if found.disturbed_s:
        console.print(
            f"slow workers and pauses add {format_time(found.disturbed_s)} to a step, in the mean "
            f"of {found.num_steps}",
            soft_wrap=True,
        )
    if found.mean_staleness:
        console.print(f"mean staleness {found.mean_staleness:.2f} versions")


def _s(count: int) -> str:
    return "s" if count > 1 else ""
