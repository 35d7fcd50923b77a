"""A schedule of forwards only, for evaluation and generation.

A state machine for one rank, driven like the training schedules. Of several stages of a rank the
latest goes first, so that results leave the pipeline as early as possible; the ranks of a tensor
group, which must agree, run their stages in a fixed order instead.
"""

from __future__ import annotations

from collections import deque

from ganglion.decide.schedules.pipeline.action import FORWARD, Action, Message, action
from ganglion.decide.schedules.pipeline.schedule import StageMap


class ForwardOnly:
    """Runs the microbatches of a range through the stages of a rank."""

    def __init__(
        self, rank: int, stage_map: StageMap, microbatches: range, *, in_turn: bool = False
    ) -> None:
        """Begin with all inputs of the model's first stage, if this rank holds it."""
        self._turns = _turns(rank, stage_map, microbatches) if in_turn else None
        self._here = {stage: set[int]() for stage in reversed(stage_map.stages_of(rank))}
        self._microbatches = microbatches
        self._num_left = len(self._here) * len(microbatches)
        self._is_busy = False
        if 0 in self._here:
            self._here[0].update(microbatches)

    @property
    def done(self) -> bool:
        """Whether all microbatches have passed all stages of this rank."""
        return self._num_left == 0

    def next(self) -> Action | None:
        """Return a forward to start now, or None: wait for an event."""
        if self._is_busy:
            return None
        if self._turns is not None:
            return self._next_in_turn(self._turns)
        for stage, here in self._here.items():
            if here:
                self._is_busy = True
                first = min(here)
                here.remove(first)
                return action(FORWARD, stage, first)
        return None

    def _next_in_turn(self, turns: deque[Action]) -> Action | None:
        if not turns or turns[0].index not in self._here[turns[0].stage]:
            return None
        self._is_busy = True
        chosen = turns.popleft()
        self._here[chosen.stage].remove(chosen.index)
        return chosen

    def on_arrival(self, message: Message) -> None:
        """Record an activation; ignore those of a later run."""
        if message.microbatch in self._microbatches:
            self._here[message.stage].add(message.microbatch)

    def on_finish(self, finished: Action) -> None:
        """Record the end of a forward returned by `next`."""
        self._is_busy = False
        self._num_left -= 1


def _turns(rank: int, stage_map: StageMap, microbatches: range) -> deque[Action]:
    """Return all forwards of a rank: a group of microbatches through each stage, then the next."""
    stages, size = sorted(stage_map.stages_of(rank)), stage_map.num_ranks
    rounds = range(microbatches.start, microbatches.stop, size)
    return deque(
        action(FORWARD, stage, number)
        for first in rounds
        for stage in stages
        for number in range(first, min(first + size, microbatches.stop))
    )
