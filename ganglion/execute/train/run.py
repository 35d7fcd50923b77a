"""The run: a parallel model that takes batches and gives results, the same for every plan.

run = ganglion.parallelize(blocks, loss_fn, optimizer_factory, plan)
for result in run.steps(run.batches(dataset), until=100):
    print(result.step, result.loss)
run.drain()
run.save("checkpoints")
run.close()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from ganglion.decide.topology import Placement
from ganglion.execute.averaging.methods import ExchangeMetrics
from ganglion.execute.checkpoint import JSON
from ganglion.execute.data import Batches, MapDataset, Sampler, share_index
from ganglion.execute.measure import SavedBytes
from ganglion.execute.pipeline import Share
from ganglion.execute.tensor import TensorReport
from ganglion.execute.train.parts import RunParts
from ganglion.execute.update import StepResult
from ganglion.trace import COMPUTE, HOST


class Run:
    """A model under training. `step` counts finished updates."""

    def __init__(self, parts: RunParts) -> None:
        """Take the parts; users call `ganglion.parallelize` instead."""
        self._parts = parts
        self._drawn: list[Batches] = []
        self._results: deque[StepResult] = deque()
        self._saved_bytes: SavedBytes | None = None
        self.plan = parts.plan
        self.world = parts.world
        self.device = parts.device
        self.recorder = parts.recorder
        self.step = 0

    def steps(
        self,
        batches: Iterable[Share],
        until: int | None = None,
        *,
        drain_at: Callable[[int], bool] = lambda step: False,
    ) -> Iterator[StepResult]:
        """Train on each batch and yield its result; stop when `step` reaches `until`.

        A batch is this rank's share: (inputs, targets) of microbatch_size * num_microbatches
        samples; or a list of num_microbatches pairs (inputs, targets), which may differ in shape,
        such as sequences padded to the longest of their microbatch. The loss of a step is the mean
        of its microbatches' losses: each counts the same, however many samples or tokens it has.
        Results may come later than their batches under plans that never flush; a step
        for which `drain_at` says yes is finished before the next batch enters, so that it can be
        evaluated or saved by itself.
        """
        num_entered = self.step
        if until is not None and num_entered >= until:
            return
        for batch in batches:
            num_entered += 1
            self._keep(self._parts.executor.train(batch))
            if num_entered == until:
                break
            if drain_at(num_entered):
                self._keep(self._parts.executor.drain())
            yield from self._kept()
        self._keep(self._parts.executor.drain())
        yield from self._kept()

    def batches(
        self, dataset: MapDataset, *, seed: int | None = None, shuffle: bool = True
    ) -> Batches:
        """Return this rank's share of every batch from the present step on.

        Deterministic in (seed, step): a resumed run sees what it would have seen.
        """
        drawn = self._draw(dataset, seed, shuffle, first_step=self.step)
        self._drawn.append(drawn)
        return drawn

    def evaluate(self, dataset: MapDataset, num_batches: int) -> float:
        """Return the mean loss over the first global batches of a data set."""
        self.drain()
        drawn = self._draw(dataset, 0, False, first_step=0)
        self.recorder.step = self.step - 1
        with self.recorder.span(COMPUTE, "evaluate", step=self.step - 1):
            losses = [self._parts.executor.evaluate(drawn.at(i)) for i in range(num_batches)]
        known = [loss for loss in losses if loss is not None]
        table = self._parts.executor.gather_numbers([sum(known), len(known)])
        return float(table[:, 0].sum() / table[:, 1].sum())

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the model makes of some inputs, with the newest weights and no dropout.

        Called by all ranks with the same inputs; all get the same outputs, also those that hold
        only a stage. A `model` for `ganglion.execute.models.generate`:

            generate(run.outputs, prompt, 100, seq_len=128)
        """
        self.drain()
        return self._parts.executor.outputs(inputs)

    def drain(self) -> None:
        """Finish what is in flight, so that weights and buffers are those of `step`.

        Buffers, such as running means, drift apart between ranks that see different samples; those
        of the first samples count.
        """
        self._keep(self._parts.executor.drain())
        group = self.world.group(*self.plan.summed_axes)
        for buffer in self._parts.buffers.values():
            group.broadcast(buffer).wait()

    def request_stop(self) -> None:
        """Ask all ranks to stop; the next result says `stop_requested` everywhere."""
        self._parts.executor.request_stop()

    def save(
        self, folder: str | Path, *, keep: int = 2, extra: Mapping[str, JSON] | None = None
    ) -> Path:
        """Write a checkpoint below `folder` and keep the newest `keep`; called by all ranks."""
        self.drain()
        from ganglion.execute.train.saved import (
            save_run,  # torch's checkpoint library: slow to import
        )

        with self.recorder.span(HOST, "checkpoint", step=self.step - 1):
            return save_run(Path(folder), self._parts, self.step, keep, extra or {})

    def load(self, folder: str | Path) -> bool:
        """Continue from the newest checkpoint below `folder`; return False if there is none."""
        from ganglion.execute.train.saved import load_run  # as in `save`

        step = load_run(Path(folder), self._parts)
        self.step = step or 0
        self._parts.executor.begin_at(self.step)
        return step is not None

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the model's weights and buffers under their serial names."""
        return self._parts.model_tensors()

    def placements(self) -> Mapping[str, Placement]:
        """Return which piece of each parameter this rank holds, by name; empty if all are whole."""
        return self._parts.placements

    def tensor_report(self) -> TensorReport | None:
        """Return what was split over x, y and z, and what was not and why; None without them."""
        return self._parts.tensor_report

    def exchanges(self) -> ExchangeMetrics | None:
        """Return what this worker saw of elastic averaging; None without it."""
        averaged = self._parts.averaged
        return averaged[0].metrics() if averaged else None

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients by name, after reduction and clipping."""
        found: dict[str, Tensor] = {}
        for update in self._parts.updates:
            found.update(update.gradients())
        return found

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return what this rank holds between steps, by the categories of the memory model.

        Tensors may share memory, which belongs to the first category that has it.
        """
        return self._parts.tensors()

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """Return every rank's numbers as a (ranks, numbers) table; called by all ranks."""
        return self._parts.executor.gather_numbers(numbers)

    def count_saved(self) -> SavedBytes:
        """Begin to count what autograd keeps; a few steps later, `is_on = False` ends it."""
        held = self._parts.tensors()
        self._saved_bytes = SavedBytes(t for name in ("weights", "versions") for t in held[name])
        return self._saved_bytes

    def close(self) -> None:
        """Release threads, hooks and groups; the run cannot be used afterwards."""
        for drawn in self._drawn:
            drawn.close()
        self._parts.executor.close()
        self.world.close()

    def __enter__(self) -> Run:
        """Return the run; it is closed when the `with` block ends."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the run."""
        self.close()

    def _keep(self, results: Iterator[StepResult]) -> None:
        """Take results as they come; `steps` hands them out, also those that a drain brought."""
        saved = self._saved_bytes
        with nullcontext() if saved is None else saved.watching():
            for result in results:
                self.step = result.step
                self._results.append(result)

    def _kept(self) -> Iterator[StepResult]:
        while self._results:
            yield self._results.popleft()

    def _draw(
        self, dataset: MapDataset, seed: int | None, shuffle: bool, first_step: int
    ) -> Batches:
        sampler = Sampler(
            num_samples=len(dataset),
            global_batch_size=self.plan.global_batch_size,
            seed=self._parts.seed if seed is None else seed,
            shuffle=shuffle,
        )
        share = share_index(self.world.coordinates, self.world.mesh)
        return Batches(dataset, sampler, share, self.plan.num_shares, first_step=first_step)
