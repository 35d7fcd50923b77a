"""The worker of a pipeline rank: it does the actions of the schedule with the stages of this rank.

    forward, backward, weight    select the weights of the microbatch, run the stage
    reduce                       sum tied gradients, then all gradients over the replicas, then
                                 gather norm and loss of all ranks
    update                       make the next weights, of gradients clipped by the global norm

Gradients of a batch that is being reduced and those of the next one live in different sets, so a
pipeline that never flushes accumulates into one while the other travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ganglion.decide.schedules.pipeline import Action
from ganglion.execute.comm import Arrival, Transport
from ganglion.execute.gradients import GradientBuckets, sum_of_squares
from ganglion.execute.pipeline.blocks import Stage
from ganglion.execute.tensor import Weights
from ganglion.execute.update import (
    AveragedWeights,
    BatchEnd,
    ErrorFeedback,
    StepNumbers,
    Update,
    WeightVersions,
)

TIED = "tied"


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that a stage of another rank holds too: the gradients of both are summed.

    The one of the first stage comes first. `number` counts what the two ranks share, in the same
    order on both.
    """

    name: str
    partner: int
    number: int
    is_first: bool


@dataclass(slots=True)
class StagePart:
    """One stage on its rank; parameters go by their serial names."""

    stage: Stage
    parameters: Mapping[str, nn.Parameter]
    buckets: GradientBuckets
    update: Update
    versions: WeightVersions | None
    feedback: ErrorFeedback | None = None
    ties: tuple[Tie, ...] = ()
    num_sets: int = 1
    averaged: AveragedWeights | None = None

    def select(self, version: int) -> bool:
        """Point the parameters into a version; return whether that changed them."""
        return self.versions is not None and self.versions.select(version)


class StageWorker:
    """Does the actions of one rank."""

    def __init__(
        self,
        parts: Mapping[int, StagePart],
        numbers: StepNumbers,
        transport: Transport | None,
        end: BatchEnd,
        weights: Weights | None = None,
    ) -> None:
        """Work with the stages `parts`; `end` updates them, `weights` are stored in pieces."""
        self._weights = weights
        self._parts = parts
        self._numbers = numbers
        self._transport = transport
        self._batch_end = end
        self._inputs: dict[int, Tensor] = {}
        # Tied gradients of other ranks, by batch, rank and the number of the tie.
        self._tied: dict[tuple[int, int, int], Tensor] = {}
        self._batch_of: dict[int, int] = {}
        self._zeroed: set[int] = set()
        self._started: set[tuple[int, int]] = set()
        self._reduced: dict[int, set[int]] = {}

    def admit(self, batch: int, microbatches: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Take the data of a batch, by the number of the microbatch."""
        first, last = min(self._parts), max(self._parts)
        for number, (inputs, target) in microbatches.items():
            self._batch_of[number] = batch
            if first == 0:
                self._inputs[number] = inputs
            self._parts[last].stage.expect(number, target)

    def forward(self, action: Action, version: int, hidden: Tensor | None) -> Tensor | None:
        """Run a forward; return what goes to the next stage."""
        part = self._parts[action.stage]
        self._select(part, version)
        if part.averaged is not None:
            part.averaged.begin_pass()
        if hidden is None:
            hidden = self._inputs.pop(action.index)
        return part.stage.forward(action.index, hidden)

    def backward(self, action: Action, version: int, gradient: Tensor | None) -> Tensor | None:
        """Run a backward, or its input half; return what goes to the stage before."""
        part = self._prepared(action, version)
        return part.stage.backward(action.index, gradient)

    def weight(self, action: Action, version: int) -> None:
        """Run the weight half of a backward."""
        self._prepared(action, version).stage.weight(action.index)

    def predict(self, action: Action, hidden: Tensor, target: Tensor | None) -> Tensor:
        """Run a forward with the newest weights, remembering nothing; with a target, the loss."""
        part = self._parts[action.stage]
        self._select(part, 0 if part.versions is None else part.versions.newest)
        return part.stage.evaluate(hidden, target)

    def _prepared(self, action: Action, version: int) -> StagePart:
        """Select weights and gradients of a microbatch; the first of a batch finds zeros.

        In all stages of the rank, for two of them may share a parameter.
        """
        part, batch = self._parts[action.stage], self._batch_of[action.index]
        self._select(part, version)
        if batch not in self._zeroed:
            self._zeroed.add(batch)
            for each in self._parts.values():
                each.buckets.zero(batch % each.num_sets)
        part.buckets.select(batch % part.num_sets)
        return part

    def _select(self, part: StagePart, version: int) -> None:
        if part.select(version):
            self.on_change()

    def on_change(self) -> None:
        """Drop gathered blocks, because the weights have changed."""
        if self._weights is not None:
            self._weights.on_change()

    # --- the end of a batch --------------------------------------------------------------------

    def start_reduce(self, action: Action) -> None:
        """Start to sum the gradients of a batch: tied ones first, as both holders need them."""
        part, batch = self._parts[action.stage], action.index
        part.update.begin()
        part.buckets.select(batch % part.num_sets)
        if self._weights is not None:
            self._weights.finish_gradients(part.parameters.values())
        for tie in part.ties:
            assert self._transport is not None, "tied stages sit on different ranks"
            gradient = part.parameters[tie.name].grad
            assert gradient is not None
            self._transport.post(
                tie.partner, TIED, gradient, step=batch, stage=action.stage, microbatch=tie.number
            )

    def is_reduced(self, action: Action) -> bool:
        """Return whether the sum is there and, at the end of a batch, the norm of all ranks."""
        part, batch = self._parts[action.stage], action.index
        which = batch % part.num_sets
        key = (action.stage, batch)
        part.buckets.select(which)  # a backward of the next batch may have been in between
        if key not in self._started:
            if not self._sum_ties(part, batch):
                return False
            self._started.add(key)
            part.buckets.start(which, batch)
        if not part.buckets.is_done(which):
            return False
        part.buckets.wait(which)
        return self._is_exchanged(action.stage, batch)

    def take(self, arrival: Arrival) -> bool:
        """Take a tied gradient of another stage."""
        header = arrival.header
        if header.kind != TIED:
            return False
        self._tied[header.step, arrival.source, header.microbatch] = arrival.tensor
        return True

    def _sum_ties(self, part: StagePart, batch: int) -> bool:
        """Add the partner's gradients, if they have come, in the order of the stages."""
        keys = [(batch, tie.partner, tie.number) for tie in part.ties]
        if any(key not in self._tied for key in keys):
            return False
        for tie, key in zip(part.ties, keys, strict=True):
            mine, other = part.parameters[tie.name].grad, self._tied.pop(key)
            assert mine is not None
            mine.copy_(mine + other if tie.is_first else other + mine)
        return True

    def _is_exchanged(self, stage: int, batch: int) -> bool:
        reduced = self._reduced.setdefault(batch, set())
        reduced.add(stage)
        if len(reduced) < len(self._parts):
            return True  # the last stage of this rank to be reduced starts the gathering
        if not self._numbers.is_started(batch):
            members = [number for number, of in self._batch_of.items() if of == batch]
            loss = self._parts[max(self._parts)].stage.take_loss(members)
            self._numbers.start(batch, loss, self._square_norm(batch))
        return not self._batch_end.needs_norm or self._numbers.is_done(batch)

    def _square_norm(self, batch: int) -> float:
        """Return the sum of squares of this rank's gradients; a tied one counts once."""
        total = 0.0
        for part in self._parts.values():
            total += part.buckets.square_norm(batch % part.num_sets)
            for tie in part.ties:
                parameter = part.parameters[tie.name]
                if not tie.is_first and parameter.grad is not None:
                    square = sum_of_squares(parameter.grad)
                    total -= square / part.buckets.num_copies(parameter)
        return total

    def update(self, action: Action) -> None:
        """Make the next weights of a stage, or keep them if its batch is skipped."""
        part, batch = self._parts[action.stage], action.index
        which = batch % part.num_sets
        part.buckets.select(which)
        if self._batch_end.needs_norm:
            norm = torch.tensor(self._numbers.norm(batch), dtype=torch.float64)
            self._batch_end.decide(batch, norm)
        self._batch_end.update(batch, part.update, part.buckets.buffers(which), part.averaged)
        self.on_change()
        self._forget(action.stage, batch)

    def _forget(self, stage: int, batch: int) -> None:
        self._started.discard((stage, batch))
        self._reduced.get(batch, set()).discard(stage)
        if not self._reduced.get(batch):
            self._reduced.pop(batch, None)
            self._zeroed.discard(batch)
            for number in [n for n, b in self._batch_of.items() if b == batch]:
                del self._batch_of[number]
