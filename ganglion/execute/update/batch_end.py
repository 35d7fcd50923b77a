"""The end of a batch, once its gradients are summed: decide, make the next weights, report.

    gradients of all ranks --norm--> decision --skip, or step with averaging around--> result

Replicas and stages end their batches here. They differ in how they sum gradients and gather the
numbers of a step: a replica knows the norm before it gathers, a stage afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ganglion.execute.update.policy import GradientDecision, GradientPolicy
from ganglion.execute.update.updating import Update, Wait, all_there


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one update; equal on every rank, except for `finished_s`, its own clock.

    With a `loss_scale` (fp16), an update whose gradients overflowed is `skipped`: no weight moved.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    peak_bytes: int
    stop_requested: bool
    finished_s: float
    loss_scale: float | None = None
    skipped: bool = False


class AveragedWeights(Protocol):
    """Weights of a replica or a stage that are averaged with those of other workers."""

    def begin_pass(self) -> None:
        """Note that the forward of a batch begins."""

    def before_step(self, lr: float) -> None:
        """Take the force of an exchange, before the optimizer steps."""

    def after_step(self, lr: float) -> None:
        """Apply the force, after the optimizer has stepped."""

    def center_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the modules have the weights of the centre."""

    def close(self) -> None:
        """Finish the exchanges in flight."""


# (tensors by name, their optimizers, position of the stage on its rank); None without averaging.
AverageWeights = Callable[[Mapping[str, Tensor], Sequence[Optimizer], int], AveragedWeights | None]


class BatchEnd:
    """Ends the batches of one rank, whose weights are updated in one part or in several stages."""

    def __init__(self, policy: GradientPolicy, set_lr: Callable[[int], float]) -> None:
        """Follow `policy`; `set_lr(batch)` sets the learning rate of an update and returns it."""
        self._policy = policy
        self._set_lr = set_lr
        self._decisions: dict[int, GradientDecision] = {}
        self._rates: dict[int, float] = {}

    @property
    def needs_norm(self) -> bool:
        """Whether no update can be made before the norm of all ranks is known."""
        return self._policy.needs_norm

    def scale_of(self, batch: int) -> float:
        """Return the factor of the loss of a batch."""
        return self._policy.scale_of(batch)

    def decide(self, batch: int, norm: Tensor) -> GradientDecision:
        """Return the decision on a batch whose gradients have this norm; made once."""
        if batch not in self._decisions:
            self._decisions[batch] = self._policy.decide(batch, norm)
        return self._decisions[batch]

    def update(
        self,
        batch: int,
        update: Update,
        buffers: Sequence[Tensor],
        averaged: AveragedWeights | None,
        wait: Wait = all_there,
    ) -> None:
        """Make the next weights from the gradients in `buffers`, or skip if that was decided."""
        lr = self._rates[batch] = self._set_lr(batch)
        decision = self._decisions.get(batch)
        if decision is not None and decision.is_skipped:
            update.skip()
            return
        if averaged is not None:
            averaged.before_step(lr)
        update.step(buffers, None if decision is None else decision.factor, wait)
        if averaged is not None:
            averaged.after_step(lr)

    def unscaled(self, batch: int, norm: float) -> float:
        """Return the norm of a batch without the loss scale."""
        decision = self._decisions.get(batch)
        return norm / ((decision and decision.loss_scale) or 1.0)

    def result(
        self, batch: int, *, loss: float, grad_norm: float, stop_requested: bool, peak_bytes: int
    ) -> StepResult:
        """Return the result of an updated batch, from the numbers of all ranks, and forget it."""
        decision = self._decisions.pop(batch, None)
        return StepResult(
            step=batch + 1,
            loss=loss,
            grad_norm=grad_norm,
            lr=self._rates.pop(batch),
            peak_bytes=peak_bytes,
            stop_requested=stop_requested,
            finished_s=time.perf_counter(),
            loss_scale=None if decision is None else decision.loss_scale,
            skipped=decision is not None and decision.is_skipped,
        )
