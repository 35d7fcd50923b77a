"""Listed schedules that drain the pipeline after every batch: GPipe and 1F1B (PipeDream-Flush).

The order of a stage is written down beforehand; the stage waits for the head of its list. For 3
stages and 4 microbatches, stage 0 first:

    GPipe   F0 F1 F2 F3 B0 B1 B2 B3          1F1B   F0 F1 F2 B0 F3 B1 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3                 F0 F1 B0 F2 B1 F3 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3                 F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from ganglion.schedules.action import FORWARD, Action
from ganglion.schedules.schedule import StageSchedule


class FlushSchedule(StageSchedule):
    """Runs a list of actions per batch; the next batch begins with the updated weights."""

    def __init__(self, stage: int, num_stages: int) -> None:
        """Schedule `stage` of `num_stages`."""
        super().__init__(stage, num_stages)
        self._order: deque[Action] = deque()

    @abstractmethod
    def _num_warm_up(self, num_microbatches: int) -> int:
        """Return how many forwards come before the first backward."""

    def admit(self, num_microbatches: int) -> None:
        """Let one more batch enter: append its list."""
        first = self._starts[-1]
        super().admit(num_microbatches)
        warm_up = min(self._num_warm_up(num_microbatches), num_microbatches)
        ids = range(first, first + num_microbatches)
        self._order.extend(self._forward(k) for k in ids[:warm_up])
        for ahead, behind in zip(ids[warm_up:], ids, strict=False):
            self._order.extend((self._backward(behind), self._forward(ahead)))
        self._order.extend(self._backward(k) for k in ids[num_microbatches - warm_up :])

    def _choose(self) -> Action | None:
        if not self._order:
            return None
        head = self._order[0]
        ready = self._ready_forward() == head.index
        if head.kind != FORWARD:
            ready = head.index in self._gradients
        return self._order.popleft() if ready else None

    def _version_of_batch(self, batch: int) -> int:
        return batch

    @property
    def version_bound(self) -> int:
        """One: nothing is in flight when weights change."""
        return 1


class GPipe(FlushSchedule):
    """All forwards, then all backwards (1811.06965)."""

    def _num_warm_up(self, num_microbatches: int) -> int:
        return num_microbatches

    @property
    def live_bound(self) -> int | None:
        """As many as the batch has."""
        return None


class OneFOneB(FlushSchedule):
    """Warm up, then one forward and one backward in turn (2006.09503, section 3.2)."""

    def _num_warm_up(self, num_microbatches: int) -> int:
        return self.num_stages - self.stage

    @property
    def live_bound(self) -> int | None:
        """One for this stage and each stage behind it."""
        return self.num_stages - self.stage
