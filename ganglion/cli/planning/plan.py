"""`ganglion plan`: print the best layouts of a model on a cluster, and why they are the best."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ganglion.cli.overrides import Overrides
from ganglion.decide.config import RunFile
from ganglion.decide.costs import Cluster, find_cluster
from ganglion.decide.planner import (
    Answer,
    MeasuredRun,
    PlannedLayout,
    Question,
    answer_of,
    explain,
    question_of,
    quick_answer,
    read_measured,
    read_run,
    refined_as_a_whole,
)
from ganglion.decide.predict import Refined, refine
from ganglion.errors import ConfigError, GanglionError
from ganglion.units import GIB, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of the command."""

    source: Path
    cluster: str
    gpus: int | None
    batch: int | None
    top: int
    max_staleness: int | None
    fix: str
    method: str
    tokens: float | None
    overrides: Overrides


def plan_command(
    request: PlanRequest, *, as_json: bool, explains: bool, write: Path | None
) -> None:
    """Plan, print a table or JSON, and write the best plan if asked."""
    gc.disable()  # simulations make many small tuples and no cycles: a tenth of the time
    run, question, refined = _question(request)
    answer = answer_of(question, run, method=request.method, top=request.top)
    if write is not None:
        write_plan(answer.best, write)
    if as_json:
        budget = question.memory_bytes
        rows = [{**row.record(), "fits": row.memory_bytes <= budget} for row in answer.plans]
        print(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
    print_answer(console, answer, request.tokens)
    lines = [] if refined is None else run_sentences(refined, answer.best)
    if explains:
        lines += explain(answer, lambda new: quick_answer(new, run))
    for line in lines:
        console.print(f"- {line}", soft_wrap=True, markup=False)
    if write is not None:
        console.print(f"plan written to {write}: ganglion train RUN.toml --plan {write}")


def _question(request: PlanRequest) -> tuple[RunFile, Question, Refined | None]:
    """Return the run and the question; of a run's folder, on the cluster as the run has shown it.

    A run asks for its own ranks and batch, unless others are named.
    """
    cluster, refined = find_cluster(request.cluster), None
    gpus, batch = request.gpus, request.batch
    if request.source.is_dir():
        found = read_measured(request.source)
        run = found.run
        cluster, refined = _refined(request.source, found, cluster)
        gpus = found.plan.num_ranks if gpus is None else gpus
        batch = found.plan.global_batch_size if batch is None else batch
    else:
        run = read_run(request.source, dict(request.overrides))
    question = question_of(
        run,
        str(request.source),
        cluster,
        gpus=gpus,
        batch=batch,
        fix=request.fix,
        max_staleness=request.max_staleness,
    )
    return run, question, refined


def _refined(folder: Path, found: MeasuredRun, cluster: Cluster) -> tuple[Cluster, Refined]:
    """Return a cluster as a run has shown it: each group of its times, or their sum alone."""
    try:
        refined = refine(folder, found.run, found.plan, cluster)
    except GanglionError:
        # Of some layouts a trace does not show what took the time, but a step's length is known.
        refined = refined_as_a_whole(found, cluster)
    return refined.cluster, refined


def run_sentences(refined: Refined, best: PlannedLayout) -> list[str]:
    """Return what a run has shown, and what another layout would have been worth."""
    lines = [
        f"The run took {format_time(refined.measured_s)} a step; with the cluster file as it was "
        f"{format_time(refined.before_s)} were predicted ({refined.error_before:+.0%}), as refined "
        f"by the run {format_time(refined.after_s)} ({refined.error_after:+.0%})."
    ]
    gain = 1 - best.step_s / refined.after_s
    size = best.plan.microbatch_size
    better = f"{best.layout} under {best.plan.schedule}, microbatches of {size}"
    if gain > 0.01:
        lines.append(f"Better would have been {better}: {gain:.0%} less time a step.")
    else:
        lines.append(f"No layout is predicted to be better; the best is {better}.")
    return lines


def write_plan(row: PlannedLayout, file: Path) -> None:
    """Write a plan as JSON."""
    try:
        file.write_text(row.plan.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {file} cannot be written: {error}") from error


def print_answer(console: Console, answer: Answer, num_tokens: float | None) -> None:
    """Print the plans as a table, and what a training of so many tokens takes."""
    question, best = answer.question, answer.best
    console.print(
        f"{question.name} on {question.num_ranks} ranks of {question.cluster.name}, "
        f"{question.global_batch_size} samples a step, {best.plan.precision}: "
        f"{answer.num_considered} layouts with a schedule considered, {len(answer.plans)} "
        f"simulated",
        soft_wrap=True,
    )
    console.print(
        "d data, p pipe (* neighbours), x y z tensor; batch: microbatches x samples; peak: share "
        "of it; waits: for communication; late: updates; +recomputation +tier of optimizer state",
        soft_wrap=True,
        style="dim",
    )
    console.print(_table(answer))
    if not answer.fits:
        console.print(
            f"none of these fits: a rank has {question.memory_bytes / GIB:.1f} GiB", style="bold"
        )
    if num_tokens is not None:
        console.print(_training(answer, num_tokens), soft_wrap=True)


_HEADINGS = ("layout", "schedule", "batch", "step", "peak", "GiB", "idle", "waits", "late")
_SHORT_NAMES = {"one_f_one_b": "1f1b", "two_bw": "2bw", "zero_bubble": "zb", "zero_bubble_v": "zbv"}
_SHORT_NAMES |= {"message_driven": "axonn", "interleaved": "inter"}


def _table(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    has_scores = any(row.score_s is not None for row in answer.plans)
    rate = "tok/day" if answer.question.sample_tokens > 1 else "smp/day"
    for column in (*_HEADINGS, rate, *["score"] * has_scores):
        is_text = column in ("layout", "schedule")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in answer.plans:
        table.add_row(
            _layout(row),
            _schedule(row),
            f"{row.plan.num_microbatches}x{row.plan.microbatch_size}",
            format_time(row.step_s),
            f"{row.peak_share:.1%}",
            f"{row.memory_bytes / GIB:.1f}",
            f"{row.bubble:.1%}",
            format_time(row.exposed_s),
            str(row.staleness),
            _short(row.tokens_per_day),
            *([format_time(row.score_s)] if row.score_s is not None else []),
        )
    return table


def _layout(row: PlannedLayout) -> str:
    """Return the axes in few letters; an asterisk: ranks of a pipeline are neighbours."""
    axes = {"d": "data", "p": "pipe", "x": "x", "y": "y", "z": "z"}
    sizes = {letter: getattr(row.plan, axis) for letter, axis in axes.items()}
    inside = row.plan.rank_order.index("pipe") < row.plan.rank_order.index("data")
    text = " ".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1)
    return (text or "one rank") + "*" * (inside and row.plan.pipe > 1 and row.plan.data > 1)


def _schedule(row: PlannedLayout) -> str:
    """Return the schedule, and what else is done so that the memory suffices."""
    plan = row.plan
    text = _SHORT_NAMES.get(plan.schedule, plan.schedule) if plan.pipe > 1 else "-"
    text += f"{plan.chunks}" * (plan.chunks > 0) + f"+{plan.recompute}" * (plan.recompute != "none")
    text += f"{plan.recompute_every}" * (plan.recompute_every > 1)
    return text + f"+{plan.offload}" * (plan.offload != "none")


def _training(answer: Answer, num_tokens: float) -> str:
    """Return the days, hours of ranks and money of a training."""
    days = num_tokens / answer.best.tokens_per_day
    price = answer.price(num_tokens)
    cost = f", {price:,.0f} in the currency of the cluster file" if price is not None else ""
    return (
        f"{_short(num_tokens)} tokens with the best plan: {days:,.1f} days, "
        f"{answer.rank_hours(num_tokens):,.0f} hours of ranks{cost}"
    )


def _short(number: float) -> str:
    """Return a count with three digits and a suffix."""
    for suffix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"
