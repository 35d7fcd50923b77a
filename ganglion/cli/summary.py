"""The end of a training: a summary, measurements beside predictions, and a sample of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ganglion.cli.environment import usable_cores
from ganglion.cli.folder import read_folder
from ganglion.cli.generate import is_text_model, sample_text
from ganglion.decide.config import (
    CHECKPOINTS,
    MEMORY_FILE,
    METRICS_FILE,
    MODEL_FILE,
    PREDICTION_FILE,
)
from ganglion.decide.plan import Plan
from ganglion.decide.predict import Comparison, RankMemory, compare, read_memory
from ganglion.errors import GanglionError
from ganglion.execute.checkpoint import latest_checkpoint
from ganglion.trace import StepMetrics, read_metrics
from ganglion.units import MIB, format_bytes, format_count, format_duration, format_time

TOKEN_DATA = ("text", "synthetic")
_HEADINGS = {"gradients": "grads", "activations": "live", "recomputed": "again"}


def print_summary(folder: Path, exit_code: int) -> None:
    """Print the results in a run folder after training ended with `exit_code`."""
    console = Console(highlight=False)
    path = folder / METRICS_FILE
    metrics = read_metrics(path) if path.exists() else []
    if not metrics:
        return
    file, plan = read_folder(folder)
    console.print(_table(metrics, "tokens" if file.data.kind in TOKEN_DATA else "samples"))
    _print_memory(folder, console)
    if exit_code == 0 and plan.pipe > 1:
        print_comparison(folder, plan, usable_cores(), console)
    if exit_code == 0 and file.output.sample_tokens and is_text_model(file):
        text = sample_text(folder, file.output.sample_prompt, file.output.sample_tokens)
        console.print("sample of generated text:", style="bold")
        console.print(text, markup=False)
    _print_places(folder, console, unfinished=metrics[-1].step < file.train.steps)


def _table(metrics: list[StepMetrics], unit: str) -> Table:
    first, last = metrics[0], metrics[-1]
    total_s = sum(record.step_s for record in metrics)
    middle = sorted(record.tokens_per_s for record in metrics)[len(metrics) // 2]
    held_out = [record.val_loss for record in metrics if record.val_loss is not None]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("steps", f"{len(metrics)} in {format_duration(total_s)} (now at {last.step})")
    table.add_row("loss", f"{first.loss:.4f} -> {last.loss:.4f}")
    if held_out:
        table.add_row("held-out loss", f"{held_out[-1]:.4f}")
    table.add_row("speed", f"{format_count(middle)} {unit} a second (median step)")
    table.add_row("peak memory", f"{format_bytes(last.peak_bytes)} in the largest process")
    return table


def _print_places(folder: Path, console: Console, *, unfinished: bool) -> None:
    newest = latest_checkpoint(folder / CHECKPOINTS)
    if newest is not None:
        console.print(f"checkpoint: {newest}", soft_wrap=True)
    if (folder / MODEL_FILE).exists():
        console.print(f"weights: {folder / MODEL_FILE}", soft_wrap=True)
    if newest is not None and unfinished:
        command = f"ganglion train --resume --output.dir {folder}"
        console.print(f"continue with: {command}", soft_wrap=True)
    console.print(f"run folder: {folder}", soft_wrap=True)


# --- memory, measured and predicted --------------------------------------------------------------


def _print_memory(folder: Path, console: Console) -> None:
    """Print the rank that needed most; nothing if memory was not measured."""
    if not (folder / MEMORY_FILE).exists():
        return
    record = read_memory(folder)
    peaks = [rank.measured_peak for rank in record.ranks]
    worst = peaks.index(max(peaks))
    console.print(_memory_table(worst, record.ranks[worst]))
    if record.keeps_freed:
        console.print(
            "the peak holds freed memory too, which the process keeps for the next microbatch",
            soft_wrap=True,
        )


def _memory_table(number: int, rank: RankMemory) -> Table:
    """Return the categories that are not empty, the rest, and the peak, in MiB."""
    predicted = rank.predicted or {}
    names = [name for name, held in rank.measured.items() if held or predicted.get(name)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"memory of rank {number}")
    for name in [*(_HEADINGS.get(n, n) for n in names), "other", "peak MiB"]:
        table.add_column(name, justify="right")
    if rank.predicted is not None and rank.predicted_peak is not None:
        table.add_row("predicted", *_memory_cells(rank.predicted, rank.predicted_peak, names))
    table.add_row("measured", *_memory_cells(rank.measured, rank.measured_peak, names))
    return table


def _memory_cells(held: dict[str, int], peak: int, names: Sequence[str]) -> list[str]:
    known = [held[name] for name in names]
    return [f"{size / MIB:.1f}" for size in [*known, peak - sum(known), peak]]


# --- steps, measured and predicted ---------------------------------------------------------------


def print_comparison(folder: Path, plan: Plan, num_cores: int, console: Console) -> None:
    """Print a finished run beside its prediction, or one line with the reason why not."""
    try:
        found = compare(folder, plan, num_cores)
    except GanglionError as error:
        console.print(f"no prediction to compare with: {error}", soft_wrap=True)
        return
    (folder / PREDICTION_FILE).write_text(json.dumps(asdict(found), indent=2) + "\n")
    console.print(_comparison_table(found))
    if found.num_ranks > found.num_cores:
        console.print(
            f"{found.num_ranks} ranks on {found.num_cores} cores take turns, which the simulator "
            f"does not know: expect a difference",
            soft_wrap=True,
        )


def _comparison_table(found: Comparison) -> Table:
    measured, predicted = found.measured, found.predicted
    table = Table(title=f"steps {found.first_step} to {found.last_step}, {found.schedule}")
    for column in ("", "measured", "predicted", "difference"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("step", *_times(measured.step_s, predicted.step_s))
    table.add_row("idle", *_shares(measured.bubble, predicted.bubble))
    for pipe in range(len(measured.bubbles)):
        name = f"pipe {pipe}"
        table.add_row(f"{name} busy", *_times(measured.busy_s[pipe], predicted.busy_s[pipe]))
        table.add_row(f"{name} idle", *_shares(measured.bubbles[pipe], predicted.bubbles[pipe]))
    return table


def _times(measured_s: float, predicted_s: float) -> tuple[str, str, str]:
    share = (measured_s - predicted_s) / predicted_s if predicted_s else 0.0
    return format_time(measured_s), format_time(predicted_s), f"{share:+.1%}"


def _shares(measured: float, predicted: float) -> tuple[str, str, str]:
    points = 100 * (measured - predicted)
    return f"{measured:.1%}", f"{predicted:.1%}", f"{points:+.1f} points"
