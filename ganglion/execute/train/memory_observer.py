"""Watching the memory of a training: what autograd keeps in its first steps, and the peak."""

from __future__ import annotations

from dataclasses import fields

from ganglion.decide.costs import Memory
from ganglion.execute.measure import held_bytes
from ganglion.execute.train.job import Job
from ganglion.trace import StepMetrics

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
