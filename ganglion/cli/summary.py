"""The end of a training: what happened, a sample of generated text, and where everything is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ganglion.cli.environment import usable_cores
from ganglion.cli.folder import read_folder
from ganglion.cli.generate import is_text_model, sample_text
from ganglion.decide.config import CHECKPOINTS, METRICS_FILE, MODEL_FILE
from ganglion.decide.predict import print_memory
from ganglion.execute.checkpoint import latest_checkpoint
from ganglion.trace import StepMetrics, read_metrics
from ganglion.units import format_bytes, format_count, format_duration

TOKEN_DATA = ("text", "synthetic")


def print_summary(folder: Path, exit_code: int) -> None:
    """Print what a run folder holds after training ended with `exit_code`."""
    console = Console()
    path = folder / METRICS_FILE
    metrics = read_metrics(path) if path.exists() else []
    if not metrics:
        return
    file, plan = read_folder(folder)
    console.print(_table(metrics, "tokens" if file.data.kind in TOKEN_DATA else "samples"))
    print_memory(folder, console)
    if exit_code == 0 and plan.pipe > 1:
        from ganglion.decide.predict import print_comparison

        print_comparison(folder, plan, usable_cores(), console)
    if exit_code == 0 and file.output.sample_tokens and is_text_model(file):
        text = sample_text(folder, file.output.sample_prompt, file.output.sample_tokens)
        console.print("sample of generated text:", style="bold")
        console.print(text, markup=False, highlight=False)
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
        console.print(f"checkpoint: {newest}", soft_wrap=True, highlight=False)
    if (folder / MODEL_FILE).exists():
        console.print(f"weights: {folder / MODEL_FILE}", soft_wrap=True, highlight=False)
    if newest is not None and unfinished:
        command = f"ganglion train --resume --output.dir {folder}"
        console.print(f"continue with: {command}", soft_wrap=True, highlight=False)
    console.print(f"run folder: {folder}", soft_wrap=True, highlight=False)
