"""Observers of a training: metrics, TensorBoard events and the trace on disk, and its memory."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

from ganglion.decide.config import METRICS_FILE, TENSORBOARD, TRACE
from ganglion.decide.costs import Memory
from ganglion.execute.measure import held_bytes
from ganglion.execute.train.job import Job
from ganglion.execute.train.loop import Observer
from ganglion.trace import MetricsFile, Recorder, StepMetrics


class MetricsObserver:
    """Appends each step to `metrics.jsonl`."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Open the file, keeping the lines of steps up to `first_step`."""
        self._file = MetricsFile(path, first_step)

    def on_step(self, metrics: StepMetrics) -> None:
        """Write one line."""
        self._file.write(metrics)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardObserver:
    """Writes the same numbers as TensorBoard scalars."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open an event file below `folder` that takes the place of points after `first_step`."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always wanted

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def on_step(self, metrics: StepMetrics) -> None:
        """Write one point of every curve."""
        for name, value in asdict(metrics).items():
            if isinstance(value, list):  # counts of 0, 1, 2 ...
                value = sum(n * count for n, count in enumerate(value)) / max(1, sum(value))
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class TraceObserver:
    """Writes this rank's events after each step, so that memory stays flat."""

    def __init__(self, path: Path, recorder: Recorder) -> None:
        """Write to `path` what `recorder` collects."""
        self._recorder = recorder
        self._file = path.open("w", encoding="utf-8")

    def on_step(self, metrics: StepMetrics) -> None:
        """Move the recorded events to disk."""
        self._recorder.drain_to(self._file)

    def close(self) -> None:
        """Write what is left and close."""
        self._recorder.drain_to(self._file)
        self._file.close()


def file_observers(job: Job) -> list[Observer]:
    """Return what this rank writes: all ranks their trace, rank 0 the metrics."""
    observers: list[Observer] = []
    rank = job.run.world.rank
    if job.file.trace.enabled:
        observers.append(TraceObserver(_trace_path(job, rank), job.run.recorder))
    if rank == 0:
        observers.append(MetricsObserver(job.folder / METRICS_FILE, job.run.step))
        if job.file.output.tensorboard:
            observers.append(TensorBoardObserver(job.folder / TENSORBOARD, job.run.step))
    return observers


def _trace_path(job: Job, rank: int) -> Path:
    """Name this rank's trace; a resumed run has its own, for it may repeat steps."""
    folder = job.folder / TRACE
    folder.mkdir(exist_ok=True)
    begin = f"-from-{job.run.step}" if job.run.step else ""
    return folder / f"rank{rank}{begin}.jsonl"


NUM_COUNTED = 3  # steps: a pipeline that never flushes is full after two
_READ_EVERY = 10  # steps: the kernel remembers the peak, so nothing is lost in between
_NAMES = [field.name for field in fields(Memory)]


class MemoryObserver:
    """Takes note of the peak until the first checkpoint, whose copies are none of training's."""

    def __init__(self, job: Job) -> None:
        """Begin to count what autograd keeps."""
        self._job = job
        self._saved = job.run.count_saved()
        self._num_steps = 0
        self._peak_bytes = 0
        self._is_over = False

    def on_step(self, metrics: StepMetrics) -> None:
        """Read the peak, if it is time."""
        self._num_steps += 1
        self._saved.is_on = self._num_steps < NUM_COUNTED
        is_milestone = self._job.is_milestone(metrics.step)
        is_last = is_milestone or metrics.step == self._job.last_step
        is_due = self._num_steps <= NUM_COUNTED or self._num_steps % _READ_EVERY == 0
        if not self._is_over and (is_due or is_last):
            self._peak_bytes = self._job.memory.peak_bytes()
        self._is_over = self._is_over or is_milestone

    def close(self) -> None:
        """Do nothing: `gathered` is asked for when all ranks are done."""

    def gathered(self) -> list[tuple[Memory, int]]:
        """Return what every rank held by category, and its peak; called by all ranks."""
        own = self._own()
        numbers = [float(getattr(own, name)) for name in _NAMES]
        peak_bytes = self._peak_bytes - self._job.memory.foreign_bytes()
        table = self._job.run.gather_numbers([*numbers, float(peak_bytes)])
        return [
            (Memory(**{n: int(v) for n, v in zip(_NAMES, row[:-1], strict=True)}), int(row[-1]))
            for row in table.tolist()
        ]

    def _own(self) -> Memory:
        held = held_bytes(self._job.run.tensors())
        return Memory(**held, activations=self._saved.live_peak, recomputed=self._saved.again_peak)
