"""The run: a parallel model that takes batches and gives results, the same for every plan.

run = ganglion.parallelize(blocks, loss_fn, optimizer_factory, plan)
for result in run.steps(run.batches(dataset), until=100):
    print(result.step, result.loss)
run.drain()
run.save("checkpoints")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ganglion.checkpoint import JSON
from ganglion.data import Batches, MapDataset, Sampler, share_index
from ganglion.data.sampler import mix_seed
from ganglion.gradients import clip_by_norm, global_norm
from ganglion.trace import COMPUTE, HOST
from ganglion.train.device import peak_bytes
from ganglion.train.parts import RunParts
from ganglion.train.replica import Batch
from ganglion.train.saved import load_run, save_run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one update did; equal on every rank."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    peak_bytes: int
    stop_requested: bool


class Run:
    """A model under training. `step` counts finished updates."""

    def __init__(self, parts: RunParts) -> None:
        """Take the parts; users call `ganglion.parallelize` instead."""
        self._parts = parts
        for group in self._groups():
            group.setdefault("initial_lr", group["lr"])  # torch's own name for the base rate
        self._stop = False
        self._drawn: list[Batches] = []
        self.plan = parts.plan
        self.world = parts.world
        self.device = parts.device
        self.recorder = parts.recorder
        self.step = 0

    def steps(self, batches: Iterable[Batch], until: int | None = None) -> Iterator[StepResult]:
        """Train on each batch and yield its result; stop when `step` reaches `until`.

        A batch is this rank's share: (inputs, targets) of microbatch_size * num_microbatches
        samples. Results may come later than their batches under plans that never flush.
        """
        if until is not None and self.step >= until:
            return
        for batch in batches:
            yield self._train_step(batch)
            if self.step == until:
                return

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
        with self.recorder.span(COMPUTE, "evaluate", step=self.step - 1):
            losses = [float(self._parts.replica.evaluate(drawn.at(i))) for i in range(num_batches)]
        table = self.world.gather_numbers([sum(losses) / num_batches])
        return float(table.mean())

    def drain(self) -> None:
        """Finish what is in flight, so that weights and buffers are those of `step`.

        Buffers, such as running means, drift apart between replicas; the first replica's count.
        """
        group = self.world.group("data")
        for buffer in self._parts.buffers.values():
            group.broadcast(buffer).wait()

    def request_stop(self) -> None:
        """Ask all ranks to stop; the next result says `stop_requested` everywhere."""
        self._stop = True

    def save(
        self, folder: str | Path, *, keep: int = 2, extra: Mapping[str, JSON] | None = None
    ) -> Path:
        """Write a checkpoint below `folder` and keep the newest `keep`; called by all ranks."""
        self.drain()
        with self.recorder.span(HOST, "checkpoint", step=self.step - 1):
            return save_run(Path(folder), self._parts, self.step, keep, extra or {})

    def load(self, folder: str | Path) -> bool:
        """Continue from the newest checkpoint below `folder`; return False if there is none."""
        step = load_run(Path(folder), self._parts)
        self.step = step or 0
        return step is not None

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the model's weights and buffers under their serial names."""
        return self._parts.model_tensors()

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients by name, after reduction and clipping."""
        named = self._parts.parameters.items()
        return {name: p.grad for name, p in named if p.grad is not None}

    def close(self) -> None:
        """Release threads, hooks and groups; the run cannot be used afterwards."""
        for drawn in self._drawn:
            drawn.close()
        self._parts.reducer.close()
        self.world.close()

    def __enter__(self) -> Run:
        """Return the run; it is closed when the `with` block ends."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the run."""
        self.close()

    def _train_step(self, batch: Batch) -> StepResult:
        self._seed_step()
        self.recorder.step = self.step
        loss = self._parts.replica.forward_backward(batch, self.step)
        with self.recorder.span(COMPUTE, "update", step=self.step):
            grad_norm = self._clip()
            lr = self._update()
        self.step += 1
        return self._agree(loss, grad_norm, lr)

    def _seed_step(self) -> None:
        """Make dropout a function of (seed, step, share), so that resuming needs no state."""
        share = share_index(self.world.coordinates, self.world.mesh)
        torch.manual_seed(mix_seed(self._parts.seed, self.step, share))

    def _clip(self) -> Tensor:
        buffers = self._parts.reducer.buffers
        norm = global_norm(buffers)
        if self._parts.max_grad_norm > 0:
            clip_by_norm(buffers, norm, self._parts.max_grad_norm)
        return norm

    def _update(self) -> float:
        factor = self._parts.lr_factor(self.step)
        for group in self._groups():
            group["lr"] = group["initial_lr"] * factor
        for optimizer in self._parts.optimizers:
            optimizer.step()
        return float(self._groups()[0]["lr"])

    def _groups(self) -> list[dict[str, Any]]:
        return [g for optimizer in self._parts.optimizers for g in optimizer.param_groups]

    def _agree(self, loss: Tensor, grad_norm: Tensor, lr: float) -> StepResult:
        """Exchange the few numbers of a step, so that every rank reports the same."""
        mine = [float(loss), float(self._stop), float(peak_bytes(self._parts.device))]
        with self.recorder.span(HOST, "agree", step=self.step - 1):
            table = self.world.gather_numbers(mine)
        return StepResult(
            step=self.step,
            loss=float(table[:, 0].mean()),
            grad_norm=float(grad_norm),
            lr=lr,
            peak_bytes=int(table[:, 2].max()),
            stop_requested=bool(table[:, 1].any()),
        )

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
