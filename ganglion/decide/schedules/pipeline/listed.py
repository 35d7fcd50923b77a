"""Listed schedules: the order of a rank is fixed beforehand; its head waits for its inputs.

Every batch appends one list and ends with an update; the next batch begins with the new weights.
For 3 stages and 4 microbatches, stage 0 first:

    GPipe   F0 F1 F2 F3 B0 B1 B2 B3          1F1B   F0 F1 F2 B0 F3 B1 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3                 F0 F1 B0 F2 B1 F3 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3                 F0 B0 F1 B1 F2 B2 F3 B3

Interleaved 1F1B gives a rank several chunks of the model, so the pipeline fills in smaller steps:
the bubble shrinks by the number of chunks; messages and live activations grow. A group of one
microbatch per rank passes through the first chunk of a rank, then through its second, and so on;
backwards take the chunks in reverse (2104.04473, section 2.2):

    2 ranks, 2 chunks, 4 microbatches: rank 0's forwards as (chunk, microbatch)
        group 0: (0,0) (0,1) (1,0) (1,1)    group 1: (0,2) (0,3) (1,2) (1,3)
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from ganglion.decide.schedules.pipeline.action import BACKWARD, COMPUTE, FORWARD, Action, action
from ganglion.decide.schedules.pipeline.schedule import RankSchedule, StageMap
from ganglion.errors import LayoutError

# One computation of a batch: kind, stage, and the microbatch counted from the batch's first.
Entry = tuple[str, int, int]


class ListedSchedule(RankSchedule):
    """Runs a fixed list of computations per batch."""

    def __init__(self, rank: int, stage_map: StageMap) -> None:
        """Schedule the stages that `stage_map` gives to `rank`."""
        super().__init__(rank, stage_map)
        self._order: deque[Action] = deque()

    @abstractmethod
    def _list(self, num_microbatches: int) -> list[Entry]:
        """Return the order of one batch."""

    def admit(self, num_microbatches: int) -> None:
        """Admit one more batch and append its list."""
        first = self._num_admitted
        super().admit(num_microbatches)
        self._order.extend(
            action(kind, stage, first + index)
            for kind, stage, index in self._list(num_microbatches)
        )

    def begin(self, chosen: Action) -> None:
        """Record that an action starts now."""
        super().begin(chosen)
        if chosen.lane == COMPUTE:
            self._order.popleft()

    def _choose(self) -> Action | None:
        if not self._order:
            return None
        head = self._order[0]
        return head if self._is_ready(head) else None


class GPipe(ListedSchedule):
    """All forwards, then all backwards (1811.06965)."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, StageMap(num_stages))

    def _list(self, num_microbatches: int) -> list[Entry]:
        forwards = [(FORWARD, self.rank, k) for k in range(num_microbatches)]
        return forwards + [(BACKWARD, self.rank, k) for k in range(num_microbatches)]

    @property
    def live_bound(self) -> int | None:
        """None: the whole batch."""
        return None


class OneFOneB(ListedSchedule):
    """Warm up, then one forward and one backward in turn (2006.09503, section 3.2)."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, StageMap(num_stages))
        self._num_behind = num_stages - stage

    def _list(self, num_microbatches: int) -> list[Entry]:
        forwards = [(FORWARD, self.rank, k) for k in range(num_microbatches)]
        backwards = [(BACKWARD, self.rank, k) for k in range(num_microbatches)]
        return _one_in_turn(forwards, backwards, self._num_behind)

    @property
    def live_bound(self) -> int | None:
        """One for this stage and each stage behind it."""
        return self._num_behind


class Interleaved(ListedSchedule):
    """1F1B over `chunks` stages per rank.

    Any number of microbatches: the list is made for full groups, and the microbatches that do not
    exist are left out, which only removes dependencies: it can neither deadlock nor hold more.
    """

    def __init__(self, rank: int, num_ranks: int, *, chunks: int = 2) -> None:
        """Schedule `rank` of `num_ranks`, each with `chunks` stages."""
        if chunks < 1:
            raise LayoutError(f"interleaved: {chunks} chunks a rank hold no model; use 2")
        super().__init__(rank, StageMap(num_ranks, chunks))

    def _list(self, num_microbatches: int) -> list[Entry]:
        size = self.stage_map.num_ranks
        stages = self.stage_map.stages_of(self.rank)
        groups = [range(start, start + size) for start in range(0, num_microbatches, size)]
        forwards = [(FORWARD, s, k) for group in groups for s in stages for k in group]
        backwards = [(BACKWARD, s, k) for group in groups for s in reversed(stages) for k in group]
        order = _one_in_turn(forwards, backwards, self._num_ahead)
        return [entry for entry in order if entry[2] < num_microbatches]

    @property
    def _num_ahead(self) -> int:
        """How many forwards come before the first backward."""
        num_ranks, num_chunks = self.stage_map.num_ranks, self.stage_map.num_chunks
        behind = num_ranks - 1 - self.rank
        return 1 + (behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * num_ranks)

    @property
    def live_bound(self) -> int | None:
        """The forwards before the first backward."""
        return self._num_ahead


def _one_in_turn(forwards: list[Entry], backwards: list[Entry], num_ahead: int) -> list[Entry]:
    """Return `num_ahead` forwards, then a backward and a forward in turn, then the rest."""
    order = forwards[:num_ahead]
    for ahead, behind in zip(forwards[num_ahead:], backwards, strict=False):
        order += (behind, ahead)
    return order + backwards[max(0, len(forwards) - num_ahead) :]
