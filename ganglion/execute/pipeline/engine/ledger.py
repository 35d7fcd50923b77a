"""The ledger: which messages have come, so that none counts twice and a missing one has a name.

A message may come before its batch was admitted here, for the stage before may be ahead; once its
batch has ended it cannot come any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ganglion.decide.schedules.pipeline import BACKWARD, FORWARD, Action, ForwardOnly, Message
from ganglion.errors import ProtocolError
from ganglion.execute.comm import Arrival


class Ledger:
    """What the stages of one rank have received, and what they still await."""

    def __init__(self, stages: Sequence[int], num_stages: int) -> None:
        """Record messages for `stages`, out of `num_stages` of the model."""
        self._stages = tuple(stages)
        self._last = num_stages - 1
        self._came: set[tuple[str, int, int]] = set()
        self._forwarded: set[tuple[int, int]] = set()  # (stage, microbatch) that went forward
        self._ends: deque[int] = deque()  # of each batch under way: the microbatch after its last
        self._first = 0  # of the oldest batch under way
        self._next = 0  # after the newest one

    def begin_at(self, microbatch: int) -> None:
        """Count microbatches from this on."""
        self._first = self._next = microbatch

    def admit(self, num_microbatches: int) -> None:
        """Add a batch."""
        self._next += num_microbatches
        self._ends.append(self._next)

    def is_awaited(self, message: Message) -> bool:
        """Return whether a message has a stage here and is new; it then counts as received."""
        kind, stage, microbatch, _ = message
        key = (kind, stage, microbatch)
        has_sender = stage > 0 if kind == FORWARD else stage < self._last
        if stage not in self._stages or not has_sender:
            return False
        if microbatch < self._first or key in self._came:
            return False
        self._came.add(key)
        return True

    def went_forward(self, stage: int, microbatch: int) -> None:
        """Expect a gradient of this microbatch."""
        if stage < self._last:
            self._forwarded.add((stage, microbatch))

    def end_batch(self) -> None:
        """Forget the oldest batch: all of it is updated."""
        self._first = self._ends.popleft()
        self._came = {key for key in self._came if key[2] >= self._first}
        self._forwarded = {key for key in self._forwarded if key[1] >= self._first}

    def awaited(self) -> str:
        """Name the first message of each sort that a stage lacks."""
        names = []
        for stage in self._stages:
            names += [
                f"the activations of microbatch {k} for stage {stage}"
                for k in self._missing_inputs(stage)[:1]
            ]
            names += [
                f"the gradient of microbatch {k} for stage {stage}"
                for k in self._missing_gradients(stage)[:1]
            ]
        return " or ".join(names) or "activations and gradients"

    def _missing_inputs(self, stage: int) -> list[int]:
        if stage == 0:
            return []
        known = range(self._first, self._next)
        return [k for k in known if (FORWARD, stage, k) not in self._came]

    def _missing_gradients(self, stage: int) -> list[int]:
        went = sorted(k for at, k in self._forwarded if at == stage)
        return [k for k in went if (BACKWARD, stage, k) not in self._came]


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
        """End a run."""
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
