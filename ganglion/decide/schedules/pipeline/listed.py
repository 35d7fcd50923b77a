"""Listed schedules: the order of a rank is written down beforehand, and its head is waited for.

Every batch appends one list and ends with an update; the next batch begins with the new weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from ganglion.decide.schedules.pipeline.action import COMPUTE, Action, action
from ganglion.decide.schedules.pipeline.schedule import RankSchedule
from ganglion.decide.schedules.pipeline.stage_map import StageMap

# One computation of a batch: kind, stage, and the microbatch counted from the batch's first.
Entry = tuple[str, int, int]


class ListedSchedule(RankSchedule):
    """Runs a list of computations per batch."""

    def __init__(self, rank: int, stage_map: StageMap) -> None:
        """Schedule the stages that `stage_map` gives to `rank`."""
        super().__init__(rank, stage_map)
        self._order: deque[Action] = deque()

    @abstractmethod
    def _list(self, num_microbatches: int) -> list[Entry]:
        """Return the order of one batch."""

    def admit(self, num_microbatches: int) -> None:
        """Let one more batch enter: append its list."""
        first = self._num_admitted
        super().admit(num_microbatches)
        self._order.extend(
            action(kind, stage, first + index)
            for kind, stage, index in self._list(num_microbatches)
        )

    def begin(self, chosen: Action) -> None:
        """Take note that an action starts now."""
        super().begin(chosen)
        if chosen.lane == COMPUTE:
            self._order.popleft()

    def _choose(self) -> Action | None:
        if not self._order:
            return None
        head = self._order[0]
        return head if self._is_ready(head) else None

    def _version_of_batch(self, batch: int) -> int:
        return batch

    @property
    def version_bound(self) -> int:
        """One: nothing is in flight when weights change."""
        return 1
