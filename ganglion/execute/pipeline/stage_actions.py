"""What the engine asks of those who compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ganglion.decide.schedules.pipeline import Action
from ganglion.execute.comm import Arrival

# (action, activations or None on the first stage): run a forward; return what goes on, if anything.
Predict = Callable[[Action, Tensor | None], Tensor | None]


class StageActions(Protocol):
    """What does the actions of one rank."""

    def forward(self, action: Action, version: int, hidden: Tensor | None) -> Tensor | None:
        """Run a forward; return what goes to the next stage."""

    def backward(self, action: Action, version: int, gradient: Tensor | None) -> Tensor | None:
        """Run a backward, or its input half; return what goes to the stage before."""

    def weight(self, action: Action, version: int) -> None:
        """Run the weight half of a backward."""

    def start_reduce(self, action: Action) -> None:
        """Start to sum the gradients of a batch over the replicas."""

    def is_reduced(self, action: Action) -> bool:
        """Say whether the sum is there; called again until it is."""

    def update(self, action: Action) -> None:
        """Make the next weights."""

    def take(self, arrival: Arrival) -> bool:
        """Take a message that is no activation or gradient; say whether it was known."""
