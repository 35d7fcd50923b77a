"""The training loop, its observers, and the length of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ganglion.execute.averaging.methods import ExchangeMetrics
from ganglion.execute.train.job import Job, is_due
from ganglion.execute.update import StepResult
from ganglion.trace import StepMetrics


class StepWatch:
    """Measures steps from the end of one to the end of the next, without what lies between.

    A pipeline that is drained ends several steps before the first of them is reported: their ends
    count, not the moments of the reports. Evaluating and saving belong to no step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin the first step now."""
        self._clock = clock
        self._ended_s = self._resumed_s = clock()
        self._reported_s = 0.0
        self._paused_s = 0.0

    def step_s(self, finished_s: float) -> float:
        """Return how long the step took that ended at `finished_s` and is reported now."""
        self._reported_s = self._clock()
        took_s = finished_s - self._ended_s
        self._ended_s = finished_s
        if finished_s >= self._resumed_s:  # it went on after the pauses, not before them
            took_s -= self._paused_s
            self._paused_s = 0.0
        return took_s

    def pause_over(self) -> None:
        """End the pause after the last report."""
        self._resumed_s = self._clock()
        self._paused_s += self._resumed_s - self._reported_s


logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Something that watches a training on one rank."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Observe a finished step."""

    def close(self) -> None:
        """Finish; also called when training failed."""


def train(job: Job, observers: Sequence[Observer]) -> None:
    """Train until the job's last step, or until some rank was asked to stop."""
    run = job.run
    logger.info("training from step %d to %d", run.step, job.last_step)
    batches = run.batches(job.source.train)
    watch = StepWatch()
    for result in run.steps(batches, until=job.last_step, drain_at=job.is_milestone):
        step_s = watch.step_s(result.finished_s)
        last = result.step == job.last_step
        # Asynchronous workers read of a stop at different steps, and must do the same then.
        interrupted = result.stop_requested and (run.plan.drifts or not last)
        # Somebody waits for the stop: save at once, without an evaluation.
        val_loss = None if interrupted else _evaluate_if_due(job, result.step, last)
        metrics = _metrics(job, result, step_s, val_loss)
        if result.skipped:
            logger.warning(
                "step %d skipped: gradients overflowed at loss scale %.0f",
                *(result.step, result.loss_scale),
            )
        for observer in observers:
            observer.on_step(metrics)
        if last or interrupted or is_due(result.step, job.file.checkpoint.every):
            _save(job)
        if interrupted:
            logger.info("stopped on request at step %d", run.step)
            return
        watch.pause_over()


def _evaluate_if_due(job: Job, step: int, last: bool) -> float | None:
    if job.source.held_out is None or not (last or is_due(step, job.file.train.eval_every)):
        return None
    val_loss = job.run.evaluate(job.source.held_out, job.file.train.eval_batches)
    logger.info("step %d: val_loss %.4f", step, val_loss)
    return val_loss


def _metrics(job: Job, result: StepResult, step_s: float, val_loss: float | None) -> StepMetrics:
    seen = job.run.exchanges()
    return StepMetrics(
        step=result.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        tokens_per_s=job.tokens_per_step / step_s,
        step_s=step_s,
        lr=result.lr,
        peak_bytes=result.peak_bytes,
        val_loss=val_loss,
        loss_scale=result.loss_scale,
        skipped=None if result.loss_scale is None else result.skipped,
        **({} if seen is None else _exchanged(seen)),
    )


def _exchanged(seen: ExchangeMetrics) -> dict[str, Any]:
    """Return what a worker saw of elastic averaging, by the names of the record."""
    return {
        "exchanges": seen.num_exchanges,
        "exchanges_discarded": seen.num_discarded,
        "exchange_wait_s": seen.wait_s,
        "exchange_comm_s": seen.comm_s,
        "exchange_exposed_s": seen.exposed_s,
        "exchange_bytes": seen.sent_bytes,
        "exchange_concurrency": seen.concurrency,
        "exchange_queue": seen.max_queue,
        "exchange_retries": seen.num_retries,
        "workers": seen.num_workers,
        "staleness": _counts(seen.staleness),
        "staleness_p99": seen.staleness_p99,
        "staleness_max": seen.staleness_max,
        "consensus": seen.consensus,
        "center_move": seen.center_move,
        "center_speed": seen.center_speed,
        "center_age_s": seen.age_s,
        "force": seen.force,
        "step_norm": seen.step_norm,
        "lost_update": seen.lost_update,
    }


def _counts(histogram: Mapping[int, int]) -> list[int]:
    """Return how often each number came, from 0 to the greatest."""
    return [histogram.get(number, 0) for number in range(max(histogram, default=-1) + 1)]


def _save(job: Job) -> None:
    path = job.run.save(job.checkpoints, keep=job.file.checkpoint.keep)
    logger.info("saved %s", path)
