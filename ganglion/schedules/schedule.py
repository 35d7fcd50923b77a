"""The contract of a schedule, and what all schedules with one stage a rank share.

A schedule is a state machine for one rank. It takes events and returns actions; it knows no clock,
moves no bytes and runs the same under the simulator and the engine:

    schedule.admit(8)                     a batch of 8 microbatches may enter
    while not schedule.done:
        action = schedule.next()          something to start now, or None: wait
        schedule.on_arrival(message)      an activation or a gradient came
        schedule.on_finish(action)        something started earlier has ended

Each lane runs one action at a time, so `next()` may be called while other lanes are busy, and
finishes may come in any order. Microbatches are numbered from 0 through all batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from typing import Protocol

from ganglion.errors import LayoutError
from ganglion.schedules.action import (
    BACKWARD,
    COMM,
    COMPUTE,
    FORWARD,
    HOST,
    REDUCE,
    UPDATE,
    Action,
    Message,
    action,
)

_LATER = 1000  # a batch far from the start


class Schedule(Protocol):
    """What a driver needs."""

    def admit(self, num_microbatches: int) -> None:
        """Let one more batch enter."""

    def stop_admitting(self) -> None:
        """Say that no batch will follow: what is in flight may drain."""

    def next(self) -> Action | None:
        """Return an action to start now on its idle lane, or None until something happens."""

    def on_arrival(self, message: Message) -> None:
        """Take note of an activation or a gradient."""

    def on_finish(self, finished: Action) -> None:
        """Take note of the end of an action returned by `next`."""

    def version_of(self, microbatch: int) -> int:
        """Return the weights that forward and backward of a microbatch use."""

    @property
    def done(self) -> bool:
        """Whether all admitted work has ended and none will follow."""


class StageSchedule(ABC):
    """One stage a rank: readiness, batches, versions and lanes; subclasses choose what to run."""

    def __init__(self, stage: int, num_stages: int) -> None:
        """Schedule `stage` of `num_stages`."""
        if num_stages < 1 or not 0 <= stage < num_stages:
            raise LayoutError(f"stage {stage} of {num_stages} stages does not exist; use 0 or more")
        self.stage = stage
        self.num_stages = num_stages
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self._starts: list[int] = [0]  # first microbatch of each batch, and of the one to come
        self._admitting = True
        self._inputs: set[int] = set()  # activations that came and were not used yet
        self._gradients: deque[int] = deque()  # gradients that came, in order of arrival
        self._next_forward = 0
        self._backwards_left: list[int] = []
        self._to_reduce: deque[int] = deque()
        self._to_update: deque[int] = deque()
        self._busy: set[str] = set()
        self.num_live = 0
        self.version = 0

    # --- what a subclass decides -------------------------------------------------------------

    @abstractmethod
    def _choose(self) -> Action | None:
        """Return the compute action to start now, or None."""

    @abstractmethod
    def _version_of_batch(self, batch: int) -> int:
        """Return how many updates the weights of a batch have seen."""

    @property
    @abstractmethod
    def live_bound(self) -> int | None:
        """The most microbatches between forward and backward; None: as many as a batch has."""

    @property
    @abstractmethod
    def version_bound(self) -> int:
        """The most weight versions kept at once."""

    @property
    def staleness(self) -> int:
        """How many updates old the weights of a batch are, once the pipeline is full."""
        return _LATER - self._version_of_batch(_LATER)

    # --- the contract ------------------------------------------------------------------------

    def admit(self, num_microbatches: int) -> None:
        """Let one more batch enter."""
        if num_microbatches < 1:
            raise LayoutError(f"a batch of {num_microbatches} microbatches is empty; use 1 or more")
        self._starts.append(self._starts[-1] + num_microbatches)
        self._backwards_left.append(num_microbatches)

    def stop_admitting(self) -> None:
        """Say that no batch will follow."""
        self._admitting = False

    @property
    def done(self) -> bool:
        """Whether all admitted work has ended and none will follow."""
        idle = not self._busy and not self._to_reduce and not self._to_update
        return idle and not self._admitting and not any(self._backwards_left)

    def version_of(self, microbatch: int) -> int:
        """Return the weights that forward and backward of a microbatch use."""
        return self._version_of_batch(self.batch_of(microbatch))

    def batch_of(self, microbatch: int) -> int:
        """Return the batch that a microbatch belongs to."""
        return bisect_right(self._starts, microbatch) - 1

    def next(self) -> Action | None:
        """Return an action to start now on its idle lane, or None until something happens."""
        chosen = None
        if COMPUTE not in self._busy:
            chosen = self._choose()
        if chosen is None and self._to_reduce and COMM not in self._busy:
            chosen = action(REDUCE, self.stage, self._to_reduce.popleft())
        if chosen is None and self._to_update and HOST not in self._busy:
            chosen = action(UPDATE, self.stage, self._to_update.popleft())
        if chosen is not None:
            self._start(chosen)
        return chosen

    def on_arrival(self, message: Message) -> None:
        """Take note of an activation or a gradient."""
        if message.kind == FORWARD:
            self._inputs.add(message.microbatch)
        else:
            self._gradients.append(message.microbatch)

    def on_finish(self, finished: Action) -> None:
        """Take note of the end of an action."""
        self._busy.discard(finished.lane)
        if finished.kind == FORWARD and self.is_last:
            self._gradients.append(finished.index)  # the loss is here: its gradient is ready
        elif finished.kind == BACKWARD:
            self._end_backward(finished.index)
        elif finished.kind == REDUCE:
            self._to_update.append(finished.index)
        elif finished.kind == UPDATE:
            self.version = finished.index + 1

    # --- what choices are made of ------------------------------------------------------------

    def _ready_forward(self) -> int | None:
        """Return the next microbatch to go forward, if its input and its weights are here."""
        microbatch = self._next_forward
        if microbatch >= self._starts[-1]:
            return None
        if not self.is_first and microbatch not in self._inputs:
            return None
        return microbatch if self.version_of(microbatch) <= self.version else None

    def _start(self, chosen: Action) -> None:
        self._busy.add(chosen.lane)
        if chosen.kind == FORWARD:
            self._inputs.discard(chosen.index)
            self._next_forward += 1
            self.num_live += 1
        elif chosen.kind == BACKWARD:
            self._gradients.remove(chosen.index)

    def _end_backward(self, microbatch: int) -> None:
        self.num_live -= 1
        batch = self.batch_of(microbatch)
        self._backwards_left[batch] -= 1
        if self._backwards_left[batch] == 0:
            self._to_reduce.append(batch)

    def _forward(self, microbatch: int) -> Action:
        return action(FORWARD, self.stage, microbatch)

    def _backward(self, microbatch: int) -> Action:
        return action(BACKWARD, self.stage, microbatch)
