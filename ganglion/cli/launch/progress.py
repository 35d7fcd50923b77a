"""The progress of a training: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from ganglion.execute.train import Job
from ganglion.trace import StepMetrics
from ganglion.units import format_count, format_duration

_PLAIN_EVERY_S = 5.0


class Progress:
    """The step, loss, speed, share of the machine's measured peak and time left."""

    def __init__(self, job: Job, console: Console | None = None) -> None:
        """Print a description of the job and start the live line, on a terminal."""
        self._job = job
        self._console = console or Console()
        self._elapsed_s = 0.0
        self._shown_s = 0.0
        self._first_step = job.run.step
        self._console.print(describe(job), highlight=False, soft_wrap=True)
        self._bar = self._start_bar() if self._console.is_terminal else None

    def on_step(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        self._elapsed_s += metrics.step_s
        text = self._text(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, text=text)
        elif self._is_due(metrics):
            self._shown_s = self._elapsed_s
            self._console.print(
                f"step {metrics.step}/{self._job.last_step}  {text}",
                highlight=False,
                soft_wrap=True,
            )

    def close(self) -> None:
        """Stop the live line, with the last step in it."""
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self) -> Bar:
        bar = Bar(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            console=self._console,
        )
        self._task = bar.add_task(
            "train", total=self._job.last_step, completed=self._first_step, text="starting"
        )
        bar.start()
        return bar

    def _is_due(self, metrics: StepMetrics) -> bool:
        """Return whether a log file gets a line: first, last, evaluated, or some seconds later."""
        ends = metrics.step in (self._first_step + 1, self._job.last_step)
        waited = self._elapsed_s - self._shown_s >= _PLAIN_EVERY_S
        return ends or waited or metrics.val_loss is not None

    def _text(self, metrics: StepMetrics) -> str:
        done = metrics.step - self._first_step
        left_s = self._elapsed_s / done * (self._job.last_step - metrics.step)
        parts = [
            f"loss {metrics.loss:.4f}",
            f"{format_count(metrics.tokens_per_s)} {self._job.unit}/s",
            self._share_text(metrics),
            f"{format_duration(left_s)} left",
        ]
        if metrics.val_loss is not None:
            parts.insert(1, f"val_loss {metrics.val_loss:.4f}")
        return "  ".join(part for part in parts if part)

    def _share_text(self, metrics: StepMetrics) -> str:
        if self._job.flops_per_token is None:
            return ""
        share = self._job.flops_per_token * metrics.tokens_per_s / self._job.peak_flops
        return f"{share:.0%} of peak"


def describe(job: Job) -> str:
    """Return one line with the model, the layout and the measured peak."""
    plan = job.run.plan
    axes = " x ".join(f"{axis}={size}" for axis, size in plan.mesh().sizes().items() if size > 1)
    return (
        f"{job.file.model.build or job.file.model.kind}: "
        f"{format_count(job.num_parameters)} parameters, "
        f"{plan.num_ranks} process{'es' if plan.num_ranks > 1 else ''} ({axes or 'data=1'}), "
        f"{format_count(job.tokens_per_step)} {job.unit} a step, "
        f"measured peak {job.peak_flops / 1e9:.0f} GFLOP/s"
    )
