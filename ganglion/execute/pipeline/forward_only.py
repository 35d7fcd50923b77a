"""Activations of runs that only go forward, kept until their run asks for them.

Such runs follow each other and a rank may be ahead of the next by several: what belongs to a later
one waits here. Microbatches are numbered through all of them.
"""

from __future__ import annotations

from torch import Tensor

from ganglion.decide.schedules.pipeline import FORWARD, Action, ForwardOnly, Message
from ganglion.errors import ProtocolError
from ganglion.execute.comm import Arrival

PREDICT_KIND = "predict"


class ForwardOnlyInputs:
    """What came for the stages of this rank, by stage and microbatch."""

    def __init__(self) -> None:
        """Begin with nothing come and no run under way."""
        self._here: dict[tuple[int, int], Tensor] = {}
        self._schedule: ForwardOnly | None = None
        self._num_ended = 0  # microbatches of runs that are over

    def begin(self, schedule: ForwardOnly) -> None:
        """Announce what has come to the schedule of a run, and from now on what comes."""
        self._schedule = schedule
        for stage, microbatch in self._here:
            schedule.on_arrival(Message(FORWARD, stage, microbatch, 0))

    def end(self, microbatches: range) -> None:
        """Say that a run is over."""
        self._schedule = None
        self._num_ended = microbatches.stop

    def take(self, arrival: Arrival) -> None:
        """Keep activations; refuse those that have come before."""
        stage, microbatch = key = (arrival.header.stage, arrival.header.microbatch)
        if key in self._here or microbatch < self._num_ended:
            raise ProtocolError(
                f"rank {arrival.source} sent {arrival.header}, which has come before"
            )
        self._here[key] = arrival.tensor
        if self._schedule is not None:
            self._schedule.on_arrival(Message(FORWARD, stage, microbatch, 0))

    def pop(self, action: Action) -> Tensor | None:
        """Return the activations of a forward; None on the model's first stage."""
        return self._here.pop((action.stage, action.index), None)
