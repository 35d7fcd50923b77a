"""What runs the batches of a run: one replica on this rank, or the stages of a pipeline.

A batch goes in, outcomes come out: at once, or a batch later under a schedule that never flushes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ganglion.execute.update import StepResult

Batch = tuple[Tensor, Tensor]
# What a rank trains on in a step: a batch to be cut into microbatches, or the microbatches.
Share = Batch | Sequence[Batch]


class Executor(Protocol):
    """Trains on batches, in order."""

    def begin_at(self, step: int) -> None:
        """Say that `step` updates have been made: a resumed run."""

    def train(self, batch: Share) -> Iterator[StepResult]:
        """Let a batch enter and yield the results that are there, in order of their steps."""

    def drain(self) -> Iterator[StepResult]:
        """Finish what is in flight and yield the results."""

    def older_weights(self) -> dict[str, Tensor]:
        """Return weights that are not the newest but still needed, by name, to save and load."""

    def evaluate(self, batch: Share) -> float | None:
        """Return the mean loss of this rank's share of a batch, if it is known here.

        Nothing may be in flight.
        """

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the newest weights make of some inputs; nothing may be in flight.

        All ranks call it with the same inputs and get the same outputs.
        """

    def request_stop(self) -> None:
        """Ask all ranks to stop; a result to come says so everywhere."""

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """Return every rank's numbers as a (ranks, numbers) table, hearing what fails elsewhere."""

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the versions of weights and the gradients that it holds, by these words."""

    def close(self) -> None:
        """Release what it holds."""
