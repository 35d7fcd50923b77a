"""The interface between a method of averaging and the loop that drives it, and the elastic force.

    begin_pass()        a forward is about to begin: overlapped exchanges start here
    ...                 forward, backward: the weights do not change
    before_step(lr)     the weights are still those the gradient was taken at
    optimizer.step()    any torch optimizer
    after_step(lr)      the force of the exchange is applied

One instance belongs to one worker and to the thread that runs its loop. The elastic force is

    e = alpha * (w - c)        w <- w - e        c <- c + e

Both halves read the same old (w, c), so w + c is kept: with the gradients off, the sum of the
centre and all workers never changes (Zhang, Choromanska, LeCun 2015, equations 3 to 6).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ganglion.execute.averaging.methods.metrics import ExchangeMetrics

State = dict[str, Any]
"""What torch.save takes: tensors, numbers and texts by name."""


class Method(Protocol):
    """A method of averaging, as ElasticAverage drives it."""

    def begin_pass(self) -> None:
        """Start an overlapped exchange; called before each forward, perhaps several a step."""

    def before_step(self, lr: float) -> None:
        """Do the part that needs the weights of the gradient; the optimizer steps next."""

    def after_step(self, lr: float) -> None:
        """Do the part that follows the optimizer's step."""

    def sync_now(self, lr: float) -> None:
        """Exchange now, in place of this step's own exchange if it has one."""

    def center(self) -> Tensor:
        """Return the newest flat centre that this worker can have, for reading only."""

    def flush(self) -> None:
        """Finish what is in flight."""

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements so far."""

    def tensors(self) -> list[Tensor]:
        """Return the memory kept between steps, without the weights themselves."""

    def state_dict(self) -> State:
        """Return copies of everything that a bit-exact resume needs, except the weights."""

    def load_state_dict(self, state: State) -> None:
        """Continue from the result of state_dict."""

    def close(self) -> None:
        """Release everything; the method cannot be used afterwards."""


class NoOverlap:
    """The hooks of a method that has nothing in flight during a pass."""

    def begin_pass(self) -> None:
        """Do nothing: no exchange starts before a forward."""

    def before_step(self, lr: float) -> None:
        """Do nothing: the exchange needs the weights after the step."""

    def flush(self) -> None:
        """Do nothing: nothing is in flight between steps."""


def elastic_force(
    worker: Tensor, center: Tensor, alpha: float, out: Tensor | None = None
) -> Tensor:
    """Return alpha * (worker - center), in `out` if given."""
    return torch.sub(worker, center, out=out).mul_(alpha)


def elastic_step_(worker: Tensor, center: Tensor, alpha: float) -> None:
    """Move a worker and the centre towards each other by the same force."""
    force = elastic_force(worker, center, alpha)
    worker.sub_(force)
    center.add_(force)
