"""The parts of a run, as `parallelize` joins them and saving needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.decide.plan import Plan
from ganglion.decide.schedules import LossScale
from ganglion.decide.topology import Placement
from ganglion.execute.comm import World
from ganglion.execute.pipeline import Executor
from ganglion.execute.tensor import TensorReport
from ganglion.execute.train.averaged import Averaged
from ganglion.execute.update import Update
from ganglion.trace import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything a run holds; parameters and buffers go by their serial names.

    `feedback` holds the last updates of error feedback by name, None without it. `placements` give
    the piece of each parameter on this rank, empty if all are whole; `tensor_report` lists what was
    split and what not, None without tensor axes. `averaged` is empty without elastic averaging.
    `scaling` is that of the loss, None unless in fp16.
    """

    plan: Plan
    world: World
    device: torch.device
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    executor: Executor
    updates: Sequence[Update]
    feedback: Mapping[str, Tensor] | None
    recorder: Recorder
    seed: int
    placements: Mapping[str, Placement]
    tensor_report: TensorReport | None
    averaged: Sequence[Averaged]
    scaling: LossScale | None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of all parts of this rank."""
        return [optimizer for update in self.updates for optimizer in update.optimizers]

    def model_tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers under their serial names, without their history.

        Weights that are trained are those of the updates, in full precision.
        """
        named: dict[str, Tensor] = {**self.parameters, **self.buffers}
        for update in self.updates:
            named.update(update.weights())
        return {name: tensor.detach() for name, tensor in named.items()}

    def on_load(self) -> None:
        """Derive the rest from `model_tensors` that were loaded."""
        for update in self.updates:
            update.on_load()

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return what this rank holds between steps, by the categories of the memory model."""
        own = self.executor.tensors()
        found: dict[str, list[Tensor]] = {
            "weights": list(self.parameters.values()),
            "versions": list(own.get("versions", ())),
            "gradients": list(own["gradients"]),
            "center": [t for averaged in self.averaged for t in averaged.tensors()],
        }
        for update in self.updates:
            for category, tensors in update.tensors().items():
                found.setdefault(category, []).extend(tensors)
        return found

    def on_saved(self) -> None:
        """Give back memory that saving took."""
        for update in self.updates:
            update.on_saved()

    def room(self, name: str, entry: str) -> Tensor | None:
        """Return where an entry of optimizer state must be loaded to, if it is not in memory."""
        found = (update.room(name, entry) for update in self.updates)
        return next((room for room in found if room is not None), None)

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return the same as all workers share it: averaged tensors are those of the centre."""
        found = self.model_tensors()
        for averaged in self.averaged:
            found.update(averaged.center())
        return found
