"""The executor of plans with a pipeline: batches enter, results come out.

Under a schedule that flushes, a batch is trained to its end before the next enters. Under one that
never does, the next batches enter while the last is on its way, and results lag behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

from ganglion.decide.schedules.pipeline import Action
from ganglion.execute.comm import broadcast_tensor
from ganglion.execute.models import evaluation_mode
from ganglion.execute.pipeline.context import BuildContext
from ganglion.execute.pipeline.engine import Engine
from ganglion.execute.pipeline.executor import Share, cut_batch
from ganglion.execute.pipeline.stage_worker import StagePart, StageWorker
from ganglion.execute.update import BatchEnd, StepNumbers, StepResult, as_input, wide
from ganglion.trace import COMPUTE


@dataclass(frozen=True, slots=True)
class StageAt:
    """A stage and the pipe coordinate that holds it."""

    stage: int
    pipe: int


class PipelineExecutor:
    """Trains with the stages of this rank; the other stages are on its neighbours."""

    def __init__(
        self,
        context: BuildContext,
        engine: Engine,
        worker: StageWorker,
        parts: Mapping[int, StagePart],
        numbers: StepNumbers,
        end: BatchEnd,
        *,
        lag: int,
        last: StageAt,
        whole_output: Callable[[Tensor], Tensor],
    ) -> None:
        """Join the parts; results come `lag` batches after their batch, losses from `last`.

        `whole_output` makes of what the last block returned the output of the model.
        """
        self._whole_output = whole_output
        self._plan = context.plan
        self._world = context.world
        self._device = context.device
        self._recorder = context.recorder
        self._engine = engine
        self._worker = worker
        self._parts = parts
        self._numbers = numbers
        self._batch_end = end
        self._lag = lag
        self._last = last
        self._num_admitted = 0
        self._num_microbatches = 0
        self._num_predicted = 0
        self._pending: deque[int] = deque()
        self._stop = False

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._stop

    def begin_at(self, step: int) -> None:
        """Begin after `step` updates: a resumed run."""
        self._num_admitted = step
        self._num_microbatches = step * self._plan.num_microbatches
        self._engine.begin_at(step, self._num_microbatches)
        for part in self._parts.values():
            if part.versions is not None:
                part.versions.restart(step)
        self._worker.on_change()

    def train(self, batch: Share) -> Iterator[StepResult]:
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

    def evaluate(self, batch: Share) -> float | None:
        """Return the mean loss of the share, on the rank that holds the last stage."""
        microbatches = list(cut_batch(batch, self._plan, self._device))
        losses = [float(loss) for loss in self._forwards(microbatches)]
        return sum(losses) / len(losses) if losses else None

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the model makes of some inputs, on every rank of the pipeline."""
        found = self._forwards([(as_input(inputs.to(self._device), self._plan), None)])
        group = self._world.group("pipe")
        mine = wide(self._whole_output(found[0])) if found else None
        with self._engine.telling():
            return broadcast_tensor(group, mine, self._last.pipe, self._device)

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """Return every rank's numbers; what fails on another rank is raised here too."""
        handle, table = self._world.start_gather(numbers)
        self._engine.wait_for(handle.is_done, "the numbers of all ranks")
        with self._engine.telling():
            handle.wait()
        return table

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the versions and the gradients of all its stages."""
        parts = self._parts.values()
        kept = [part.versions for part in parts if part.versions is not None]
        sets = [part.buckets.buffers(i) for part in parts for i in range(part.num_sets)]
        return {
            "versions": [flat for versions in kept for flat in versions.flat()],
            "gradients": [buffer for buffers in sets for buffer in buffers],
        }

    def close(self) -> None:
        """Close the transports and let go of the gradients."""
        for part in self._parts.values():
            if part.averaged is not None:
                part.averaged.close()
            part.buckets.close()
            part.update.close()
            part.stage.close()
        self._engine.close()

    # --- parts ---------------------------------------------------------------------------------

    def _finish_next(self) -> StepResult:
        step = self._pending[0]
        self._engine.run_until(step + 1, lambda: self._numbers.is_done(step))
        self._pending.popleft()
        loss, norm, stop, peak_bytes = self._numbers.take(step)
        return self._batch_end.result(
            step,
            loss=loss,
            grad_norm=self._batch_end.unscaled(step, norm),
            stop_requested=stop,
            peak_bytes=peak_bytes,
        )

    def _forwards(self, microbatches: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Take microbatches through the pipeline; return losses, or outputs, where it ends."""
        assert not self._pending, "drained before"
        first = self._num_predicted
        numbers = range(first, first + len(microbatches))
        self._num_predicted = numbers.stop
        results: list[Tensor] = []

        def predict(action: Action, hidden: Tensor | None) -> Tensor | None:
            inputs, target = microbatches[action.index - first]
            is_last = action.stage == self._last.stage
            found = self._worker.predict(
                action, inputs if hidden is None else hidden, target if is_last else None
            )
            if not is_last:
                return found
            results.append(found)
            return None

        modules = [block for part in self._parts.values() for block in part.stage.blocks]
        with (
            self._at_center(),
            evaluation_mode(modules),
            self._recorder.span(COMPUTE, "evaluate"),
        ):
            self._engine.run_forwards(numbers, predict)
        return results

    @contextmanager
    def _at_center(self) -> Iterator[None]:
        """Compute with the weights of the centre, if there is one."""
        averaged = [part.averaged for part in self._parts.values() if part.averaged is not None]
        with ExitStack() as stack:
            for each in averaged:
                stack.enter_context(each.center_weights())
            self._worker.on_change()
            yield
        self._worker.on_change()
