"""`ganglion simulate`: run a plan on a virtual cluster and say how long a step takes, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ganglion import trace
from ganglion.decide.config import AveragingSection, RunFile, load_run_file, read_toml, resolve
from ganglion.decide.costs import Cluster, StageTimes, find_cluster, stage_times_from_file
from ganglion.decide.plan import Plan
from ganglion.decide.predict import decide_activations, model_times
from ganglion.decide.schedules.pipeline import check_planned
from ganglion.decide.simulator import Disturbance, PlanSimulation, simulate_plan
from ganglion.decide.simulator.averaging import (
    AveragingFigures,
    average_plan,
    without_sums,
    worker_disturbances,
)
from ganglion.errors import ConfigError, LayoutError
from ganglion.trace import Event
from ganglion.units import format_bytes, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """What the user typed."""

    file: Path
    cluster: str
    nproc: int | None
    steps: int
    pauses: Sequence[str]
    slow: Sequence[str]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFigures:
    """What a step of a plan costs on a cluster.

    `step_s` is the mean time from one step's end to the next, the first step left out if there are
    more: a pipeline that never flushes fills only once. Lists have one entry for each pipe rank.
    `collective_s` is the part of forward and backward that waits for collectives inside layers.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    limit: int | None
    step_s: float
    makespan_s: float
    bubble: float
    bubbles: list[float]
    exposed_comm_s: list[float]
    peak_live: list[int]
    versions: int
    forward_s: list[float]
    backward_s: list[float]
    message_bytes: list[int]
    reduce_s: list[float]
    collective_s: list[float]
    averaging: AveragingFigures | None = None


def simulate_command(request: SimulateRequest, *, trace_file: Path | None, as_json: bool) -> None:
    """Simulate, print figures as a table or JSON, and write the trace if asked."""
    cluster = find_cluster(request.cluster)
    plan, times, section = _plan_and_times(request, cluster)
    plan.require_built()
    disturbances = _disturbances(request, plan)
    result = simulate_plan(
        plan,
        without_sums(times) if plan.averages else times,
        cluster,
        num_steps=request.steps,
        disturbances=disturbances,
        seed=request.seed,
    )
    events = result.simulation.events(result.global_rank)
    figures = _figures(result, times, events)
    if plan.averages:
        figures = _averaged(figures, plan, times, cluster, section, request, disturbances)
    if trace_file is not None:
        trace.write_trace(events, trace_file, title=f"{request.file.stem} on {cluster.name}")
    if as_json:
        print(json.dumps(asdict(figures), indent=2))
        return
    _print(figures, plan, cluster, trace_file)


def _plan_and_times(
    request: SimulateRequest, cluster: Cluster
) -> tuple[Plan, list[StageTimes], AveragingSection]:
    """Return the plan, times from the cluster's [stages] or else from the model, and [averaging].

    A plan file does not know the last; what a run file has by itself is taken then.
    """
    file = request.file
    if file.suffix == ".json":
        plan = Plan.from_json(_text(file), str(file))
        if request.nproc not in (None, plan.num_ranks):
            raise LayoutError(
                f"--nproc {request.nproc}, but {file} needs {plan.num_ranks} processes: leave out "
                f"--nproc"
            )
        if cluster.stages is None:
            raise ConfigError(
                f"{file} is a plan, which does not say how large the model is: give the run file "
                f"instead, or write the times as [stages] into {cluster.source}"
            )
        check_planned(plan)
        return plan, stage_times_from_file(cluster, plan.pipe, plan), AveragingSection()
    run = load_run_file(read_toml(file), (), str(file))
    plan = resolve(run, request.nproc or num_cluster_ranks(run, cluster))
    plan = decide_activations(run, plan)
    if cluster.stages is not None:
        return plan, stage_times_from_file(cluster, plan.pipe, plan), run.averaging
    return plan, model_times(run, plan, cluster, file), run.averaging


def _averaged(
    figures: SimulateFigures,
    plan: Plan,
    times: Sequence[StageTimes],
    cluster: Cluster,
    section: AveragingSection,
    request: SimulateRequest,
    disturbances: tuple[Disturbance, ...],
) -> SimulateFigures:
    """Return the figures of a run whose worker alone has `figures`, with what disturbs it."""

    @cache
    def step_s(worker: int, disturbed: tuple[Disturbance, ...]) -> float:
        apart = without_sums(times)
        alone = simulate_plan(
            plan, apart, cluster, num_steps=request.steps, disturbances=disturbed, seed=request.seed
        )
        return _step_s(alone, worker if disturbed else 0)  # undisturbed, one stands for all

    found = average_plan(
        plan,
        times,
        cluster,
        step_s(0, ()) if disturbances else figures.step_s,
        tau=section.tau,
        overlap=section.overlap,
        seed=request.seed,
        disturbances=worker_disturbances(disturbances, plan.pipe, step_s),
    )
    none = [0.0] * len(figures.reduce_s)
    return replace(figures, step_s=found.step_s, averaging=found, reduce_s=none)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def num_cluster_ranks(run: RunFile, cluster: Cluster) -> int | None:
    """Return the ranks of a cluster that says how many it has; a plan must fill them all."""
    if cluster.num_nodes is None:
        return None
    num_ranks = cluster.num_nodes * cluster.ranks_per_node - run.averaging.servers
    parallel = run.parallel
    needed = parallel.pipe * parallel.x * parallel.y * parallel.z
    if parallel.data != "auto":
        needed *= parallel.data
    if needed > num_ranks or num_ranks % needed:
        raise LayoutError(
            f"{cluster.source} has cluster.num_nodes * ranks_per_node = {cluster.num_nodes} * "
            f"{cluster.ranks_per_node} = {num_ranks} ranks, which layouts of {needed} ranks "
            f"(parallel.data * pipe * x * y * z) do not fill: change either"
        )
    return num_ranks + run.averaging.servers if parallel.data == "auto" else None


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


def _figures(
    result: PlanSimulation, times: Sequence[StageTimes], events: Sequence[Event]
) -> SimulateFigures:
    run, plan = result.simulation, result.plan
    by_rank = {one.rank: one for one in trace.summarise(events).ranks}
    ranks = [by_rank[result.global_rank(place)] for place in range(plan.pipe)]
    return SimulateFigures(
        schedule=plan.schedule,
        num_ranks=plan.num_ranks,
        num_microbatches=plan.num_microbatches,
        limit=result.options.limit,
        step_s=_step_s(result),
        makespan_s=run.makespan_s,
        bubble=run.bubble(),
        bubbles=[one.bubble for one in ranks],
        exposed_comm_s=[one.exposed_comm_s for one in ranks],
        peak_live=run.peak_live(),
        versions=run.num_versions(),
        forward_s=[stage.forward_s for stage in times],
        backward_s=[stage.backward_s + stage.weight_s for stage in times],
        message_bytes=[stage.message_bytes for stage in times],
        reduce_s=[stage.reduce_s for stage in times],
        collective_s=[stage.collective_s for stage in times],
    )


def _step_s(result: PlanSimulation, replica: int | None = None) -> float:
    """Return the mean time between the ends of steps, the last update of each being its end.

    That is of all replicas, or of one.
    """
    ends: dict[int, float] = {}
    for action, _, end_s, _, place in result.simulation.rows:
        if action.kind == "U" and replica in (None, place // result.plan.pipe):
            ends[action.index] = max(end_s, ends.get(action.index, 0.0))
    if len(ends) == 1:
        return ends[0]
    return (ends[max(ends)] - ends[0]) / (len(ends) - 1)


def _print(figures: SimulateFigures, plan: Plan, cluster: Cluster, trace_file: Path | None) -> None:
    console = Console()
    limit = "" if figures.limit is None else f" (limit {figures.limit})"
    ranks, count = figures.num_ranks, plan.num_microbatches
    console.print(
        f"{ranks} rank{_s(ranks)} on {cluster.name}: data {plan.data}, pipe {plan.pipe}, x "
        f"{plan.x}, y {plan.y}, z {plan.z}; {figures.schedule}{limit}, {count} "
        f"microbatch{'es' if count > 1 else ''} of {plan.microbatch_size}",
        highlight=False,
        soft_wrap=True,
    )
    per_s = plan.global_batch_size / figures.step_s if figures.step_s else 0.0
    console.print(
        f"step {format_time(figures.step_s)}, {per_s:.4g} samples/s, bubble {figures.bubble:.1%}, "
        f"{figures.versions} weight version{_s(figures.versions)}",
        style="bold",
        highlight=False,
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
        console.print(f"trace written to {trace_file}", highlight=False)


def _print_averaging(console: Console, found: AveragingFigures) -> None:
    served = f", {found.servers} server{_s(found.servers)}" if found.servers else ""
    console.print(
        f"{found.method}, {found.num_workers} worker{_s(found.num_workers)}{served}: an exchange "
        f"of {format_bytes(found.exchange_bytes)} takes {format_time(found.exchange_s)} every "
        f"{found.tau} step{_s(found.tau)}, {format_time(found.exposed_s)} of it exposed "
        f"({found.exposed_share:.1%} of all time); a step without: "
        f"{format_time(found.worker_step_s)}",
        highlight=False,
        soft_wrap=True,
    )
    if found.disturbed_s:
        console.print(
            f"slow workers and pauses add {format_time(found.disturbed_s)} to a step, in the mean "
            f"of {found.num_steps}",
            highlight=False,
            soft_wrap=True,
        )
    if found.mean_staleness:
        console.print(f"mean staleness {found.mean_staleness:.2f} versions", highlight=False)


def _s(count: int) -> str:
    return "s" if count > 1 else ""
