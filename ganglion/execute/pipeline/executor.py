"""The contract of executors, and the microbatches of the share that a rank trains on in a step.

A batch goes in, results come out: at once, or a batch later under a schedule that never flushes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard, cast

import torch
from torch import Tensor

from ganglion.decide.plan import Plan
from ganglion.errors import DataError
from ganglion.execute.update import StepResult, as_input

Batch = tuple[Tensor, Tensor]
# What a rank trains on in a step: a batch to be cut into microbatches, or the microbatches.
Share = Batch | Sequence[Batch]


class Executor(Protocol):
    """Trains on batches, in order."""

    def begin_at(self, step: int) -> None:
        """Begin after `step` updates: a resumed run."""

    def train(self, batch: Share) -> Iterator[StepResult]:
        """Let a batch enter and yield the results that are ready, in order of their steps."""

    def drain(self) -> Iterator[StepResult]:
        """Finish what is in flight and yield the results."""

    def older_weights(self) -> dict[str, Tensor]:
        """Return weights that are not the newest but still needed, by name, to save and load."""

    def evaluate(self, batch: Share) -> float | None:
        """Return the mean loss of this rank's share of a batch, if it is known here.

        Nothing may be in flight.
        """

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the newest weights for some inputs; nothing may be in flight.

        All ranks call it with the same inputs and get the same outputs.
        """

    def request_stop(self) -> None:
        """Ask all ranks to stop; a later result has `stop_requested` everywhere."""

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """Return a (ranks, numbers) table; raise what fails on another rank meanwhile."""

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the tensors it holds, by category: "versions" and "gradients"."""

    def close(self) -> None:
        """Release what it holds."""


def cut_batch(share: Share, plan: Plan, device: torch.device) -> Iterator[Batch]:
    """Yield the microbatches of a share, on the device; refuse a share of another size."""
    parts = _cut(share, plan) if _is_one_batch(share) else _given(share, plan)
    for inputs, targets in parts:
        yield as_input(inputs.to(device), plan), targets.to(device)


def _is_one_batch(share: Share) -> TypeGuard[Batch]:
    return len(share) > 0 and isinstance(share[0], Tensor)


def _cut(batch: Batch, plan: Plan) -> Iterator[Batch]:
    inputs, targets = batch
    if not len(inputs) == len(targets) == plan.share_size:
        raise DataError(
            f"a batch has {len(inputs)} inputs and {len(targets)} targets, but this rank's "
            f"share is microbatch_size * num_microbatches = {plan.microbatch_size} * "
            f"{plan.num_microbatches} = {plan.share_size}: draw batches with "
            f"run.batches(dataset)"
        )
    for start in range(0, plan.share_size, plan.microbatch_size):
        part = slice(start, start + plan.microbatch_size)
        yield inputs[part], targets[part]


def _given(share: Share, plan: Plan) -> Sequence[Batch]:
    microbatches = cast(Sequence[Batch], share)
    if len(microbatches) != plan.num_microbatches:
        raise DataError(
            f"a step was given {len(microbatches)} microbatches, but num_microbatches = "
            f"{plan.num_microbatches}: give each step of each rank as many (inputs, targets)"
        )
    for number, pair in enumerate(microbatches):
        if not _is_pair(pair):
            raise DataError(
                f"microbatch {number} of a step is no pair (inputs, targets) of as many samples, 1 "
                f"or more, but {_described(pair)}: give a list of pairs of tensors"
            )
    return microbatches


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    if not all(isinstance(part, Tensor) and part.dim() > 0 for part in pair):
        return False
    return len(pair[0]) == len(pair[1]) > 0


def _described(pair: object) -> str:
    """Describe what was given instead of a pair, with shapes."""
    if not isinstance(pair, tuple | list):
        return f"a {type(pair).__name__}"
    parts = [tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in pair]
    return f"a {type(pair).__name__} of {parts}"
