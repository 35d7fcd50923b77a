"""Forwards and nothing else: what evaluation and generation ask of a pipeline.

A state machine for one rank, driven like the training schedules. Of several stages of a rank the
one further on goes first, so that results leave the pipeline as early as they can; the ranks of a
tensor group, which must agree, take their stages in turns instead, whatever comes first.
"""

from __future__ import annotations

from collections import deque

from ganglion.decide.schedules.pipeline.action import FORWARD, Action, Message, action
from ganglion.decide.schedules.pipeline.schedule import StageMap


class ForwardOnly:
    """Takes the microbatches of a range through the stages of a rank."""

    def __init__(
        self, rank: int, stage_map: StageMap, microbatches: range, *, in_turn: bool = False
    ) -> None:
        """Begin with the inputs of the model's first stage, where it is here."""
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
        """Return a forward to start now, or None until something happens."""
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
        """Take note of activations; those of a later run are none of this one's business."""
        if message.microbatch in self._microbatches:
            self._here[message.stage].add(message.microbatch)

    def on_finish(self, finished: Action) -> None:
        """Take note of the end of a forward returned by `next`."""
        self._is_busy = False
        self._num_left -= 1


def _turns(rank: int, stage_map: StageMap, microbatches: range) -> deque[Action]:
    """List all forwards of a rank: some microbatches through each stage, then the next ones."""
    stages, size = sorted(stage_map.stages_of(rank)), stage_map.num_ranks
    rounds = range(microbatches.start, microbatches.stop, size)
    return deque(
        action(FORWARD, stage, number)
        for first in rounds
        for stage in stages
        for number in range(first, min(first + size, microbatches.stop))
    )
