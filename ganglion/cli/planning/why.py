"""`ganglion why`: explain a plan or a run in sentences with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ganglion.cli.overrides import Overrides
from ganglion.decide.config import RunFile
from ganglion.decide.plan import Plan
from ganglion.decide.planner import (
    Question,
    limit,
    memory_sentence,
    priced,
    question_of,
    read_measured,
    read_run,
    remedies,
)
from ganglion.decide.predict import read_source
from ganglion.errors import ConfigError
from ganglion.units import format_time

_QUESTIONS = ("slow", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyRequest:
    """The options of the command."""

    source: Path
    question: str
    model: str | None
    cluster: str
    overrides: Overrides


def why_command(request: WhyRequest) -> None:
    """Print what takes the time and the memory of a plan; of a run, what was measured too."""
    if request.question and request.question not in _QUESTIONS:
        raise ConfigError(
            f"{request.question!r} is not a question: ask one of {list(_QUESTIONS)}, or neither "
            f"for both"
        )
    run, plan, step_s = _read(request)
    name = str(request.model or request.source)
    question = question_of(
        run, name, request.cluster, gpus=plan.num_ranks, batch=plan.global_batch_size
    )
    for line in _lines(request.question, question, plan, step_s):
        Console(highlight=False).print(f"- {line}", soft_wrap=True, markup=False)


def _lines(about: str, question: Question, plan: Plan, step_s: float | None) -> list[str]:
    lines = []
    if about in ("", "slow"):
        row = priced(question, plan)
        lines.append(limit(row))
        if step_s is not None:
            lines.append(
                f"Measured were {format_time(step_s)} a step (median), {step_s / row.step_s:.2f} "
                f"times the prediction for {question.cluster.name}."
            )
        lines += remedies(question, row)
    if about in ("", "memory"):
        lines += memory_sentence(question, plan)
    return lines


def _read(request: WhyRequest) -> tuple[RunFile, Plan, float | None]:
    """Return the run, its plan, and the time of its steps if it was run."""
    if request.source.is_dir():
        found = read_measured(request.source)
        return found.run, found.plan, found.step_s
    plan = read_source(request.source)
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"{request.source} is not a plan: give a plan.json with --model, or the folder of a run"
        )
    if request.model is None:
        raise ConfigError(
            f"{request.source} does not name a model: add --model RUN.toml, or --model NAME"
        )
    return read_run(Path(request.model), dict(request.overrides)), plan, None
