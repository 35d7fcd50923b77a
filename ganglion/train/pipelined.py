"""The executor of plans with a pipeline: stages on several ranks, batches that enter and results.

Under a schedule that flushes, a batch is trained to its end before the next enters. Under one that
never does, the next batch enters while the last is on its way, and results lag by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ganglion.comm import Transport, World
from ganglion.models import evaluation_mode
from ganglion.pipeline import Engine
from ganglion.plan import Plan
from ganglion.trace import COMPUTE, Recorder
from ganglion.train.exchange import Exchange
from ganglion.train.executor import Batch, StepResult
from ganglion.train.microbatches import cut_batch
from ganglion.train.stage_worker import EVALUATED, StagePart, StageWorker


class PipelineExecutor:
    """Trains with the stages of this rank; the other stages are on its neighbours."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        engine: Engine,
        worker: StageWorker,
        parts: Mapping[int, StagePart],
        exchange: Exchange,
        transport: Transport | None,
        recorder: Recorder,
        *,
        rank_at: Callable[[int], int],
        current_lr: Callable[[int], float],
        device: torch.device,
        lag: int,
        timeout_s: float,
    ) -> None:
        """Join the parts; results come `lag` batches after their batch."""
        self._plan = plan
        self._world = world
        self._engine = engine
        self._worker = worker
        self._parts = parts
        self._exchange = exchange
        self._transport = transport
        self._recorder = recorder
        self._rank_at = rank_at
        self._current_lr = current_lr
        self._device = device
        self._lag = lag
        self._timeout_s = timeout_s
        self._num_admitted = 0
        self._num_microbatches = 0
        self._pending: deque[int] = deque()
        self._stop = False

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._stop

    def begin_at(self, step: int) -> None:
        """Say that `step` updates have been made: a resumed run."""
        self._num_admitted = step
        self._num_microbatches = step * self._plan.num_microbatches
        self._engine.begin_at(step, self._num_microbatches)
        for part in self._parts.values():
            if part.versions is not None:
                part.versions.restart(step)

    def train(self, batch: Batch) -> Iterator[StepResult]:
        """Let a batch enter and yield the results that are there."""
        step, first = self._num_admitted, self._num_microbatches
        self._recorder.step = step
        microbatches = dict(enumerate(cut_batch(batch, self._plan, self._device), start=first))
        self._num_admitted += 1
        self._num_microbatches += len(microbatches)
        self._worker.admit(step, microbatches)
        self._engine.admit(len(microbatches))
        self._pending.append(step)
        while len(self._pending) > self._lag:
            yield self._finish_next()

    def drain(self) -> Iterator[StepResult]:
        """Finish what is in flight and yield the results."""
        while self._pending:
            yield self._finish_next()
        for part in self._parts.values():
            if part.versions is not None:
                part.versions.select(part.versions.newest)

    def older_weights(self) -> dict[str, Tensor]:
        """Return the weights before the newest, which the next batch of a 2BW pipeline uses."""
        found = {}
        for part in self._parts.values():
            if part.versions is not None:
                found.update(part.versions.older())
        return found

    def request_stop(self) -> None:
        """Ask all ranks to stop."""
        self._stop = True

    def evaluate(self, batch: Batch) -> float | None:
        """Return the mean loss of the share, on the rank that holds the last stage."""
        assert not self._pending, "drained before"
        losses = []
        modules = [block for part in self._parts.values() for block in part.stage.blocks]
        with evaluation_mode(modules), self._recorder.span(COMPUTE, "evaluate"):
            for number, (inputs, target) in enumerate(cut_batch(batch, self._plan, self._device)):
                losses.append(self._evaluate_one(number, inputs, target))
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known else None

    def close(self) -> None:
        """Close the transport and let go of the gradients."""
        for part in self._parts.values():
            part.buckets.close()
        if self._transport is not None:
            self._transport.close()

    # --- parts ---------------------------------------------------------------------------------

    def _finish_next(self) -> StepResult:
        step = self._pending[0]
        self._engine.run_until(step + 1)
        self._pending.popleft()
        loss, norm, stop, peak_bytes = self._exchange.take(step)
        return StepResult(
            step=step + 1,
            loss=loss,
            grad_norm=norm,
            lr=self._current_lr(step),
            peak_bytes=peak_bytes,
            stop_requested=stop,
        )

    def _evaluate_one(self, number: int, inputs: Tensor, target: Tensor) -> float | None:
        """Run one microbatch through the stages of this rank, in the order of the model."""
        last = max(part.stage.num_stages for part in self._parts.values()) - 1
        result: float | None = None
        for stage, part in sorted(self._parts.items()):
            hidden = inputs if stage == 0 else self._receive(stage, number)
            part.select(0 if part.versions is None else part.versions.newest)
            output = part.stage.evaluate(hidden, target if stage == last else None)
            if stage == last:
                result = float(output)
            else:
                self._post(stage + 1, number, output)
        return result

    def _receive(self, stage: int, number: int) -> Tensor:
        """Wait for activations; they may have come while this rank was still training."""
        while (stage, number) not in self._worker.evaluated:
            assert self._transport is not None
            awaiting = "activations to evaluate"
            self._engine.take(self._transport.receive(self._timeout_s, awaiting))
        return self._worker.evaluated.pop((stage, number))

    def _post(self, stage: int, number: int, output: Tensor) -> None:
        assert self._transport is not None
        target = self._rank_at(stage)
        self._transport.post(target, EVALUATED, output, stage=stage, microbatch=number)
