"""GPipe and 1F1B (PipeDream-Flush): one stage a rank, drained after every batch.

For 3 stages and 4 microbatches, stage 0 first:

    GPipe   F0 F1 F2 F3 B0 B1 B2 B3          1F1B   F0 F1 F2 B0 F3 B1 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3                 F0 F1 B0 F2 B1 F3 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3                 F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from ganglion.decide.schedules.pipeline.action import BACKWARD, FORWARD
from ganglion.decide.schedules.pipeline.listed import Entry, ListedSchedule
from ganglion.decide.schedules.pipeline.stage_map import StageMap


def one_in_turn(forwards: list[Entry], backwards: list[Entry], num_ahead: int) -> list[Entry]:
    """Return `num_ahead` forwards, then a backward and a forward in turn, then what is left."""
    order = forwards[:num_ahead]
    for ahead, behind in zip(forwards[num_ahead:], backwards, strict=False):
        order += (behind, ahead)
    return order + backwards[max(0, len(forwards) - num_ahead) :]


class GPipe(ListedSchedule):
    """All forwards, then all backwards (1811.06965)."""

    def __init__(self, stage: int, num_stages: int) -> None:
        """Schedule `stage` of `num_stages`."""
        super().__init__(stage, StageMap(num_stages))

    def _list(self, num_microbatches: int) -> list[Entry]:
        forwards = [(FORWARD, self.rank, k) for k in range(num_microbatches)]
        return forwards + [(BACKWARD, self.rank, k) for k in range(num_microbatches)]

    @property
    def live_bound(self) -> int | None:
        """As many as the batch has."""
        return None


class OneFOneB(ListedSchedule):
    """Warm up, then one forward and one backward in turn (2006.09503, section 3.2)."""

    def __init__(self, stage: int, num_stages: int) -> None:
        """Schedule `stage` of `num_stages`."""
        super().__init__(stage, StageMap(num_stages))
        self._num_behind = num_stages - stage

    def _list(self, num_microbatches: int) -> list[Entry]:
        forwards = [(FORWARD, self.rank, k) for k in range(num_microbatches)]
        backwards = [(BACKWARD, self.rank, k) for k in range(num_microbatches)]
        return one_in_turn(forwards, backwards, self._num_behind)

    @property
    def live_bound(self) -> int | None:
        """One for this stage and each stage behind it."""
        return self._num_behind
