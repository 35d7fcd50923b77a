"""The end of a batch: its result, and weight averaging around the step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer


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
        """Note that the optimizer is about to step."""

    def after_step(self, lr: float) -> None:
        """Note that the optimizer has stepped."""

    def center_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the modules have the weights of the centre."""

    def close(self) -> None:
        """Finish the exchanges in flight."""


# (tensors by name, their optimizers, position of the stage on its rank); None without averaging.
AverageWeights = Callable[[Mapping[str, Tensor], Sequence[Optimizer], int], AveragedWeights | None]


@contextmanager
def averaging_around(averaged: AveragedWeights | None, lr: float) -> Iterator[None]:
    """Take the force of an exchange before the step of an optimizer, and apply it after."""
    if averaged is not None:
        averaged.before_step(lr)
    yield
    if averaged is not None:
        averaged.after_step(lr)
