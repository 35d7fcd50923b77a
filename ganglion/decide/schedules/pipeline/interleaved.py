"""Interleaved 1F1B: several chunks of the model a rank, so the pipeline fills in smaller steps.

Microbatches go in groups of one for each rank: a group passes through the first chunk of a rank,
then through its second, and so on (2104.04473, section 2.2). Backwards take the chunks the other
way. The bubble shrinks by the number of chunks; messages and live activations grow.

    2 ranks, 2 chunks, 4 microbatches: rank 0's forwards as (chunk, microbatch)
        group 0: (0,0) (0,1) (1,0) (1,1)    group 1: (0,2) (0,3) (1,2) (1,3)

Any number of microbatches: the list is made for full groups and the microbatches that do not exist
are left out, which only removes dependencies: it can neither deadlock nor hold more.
"""

from __future__ import annotations

from ganglion.decide.schedules.pipeline.action import BACKWARD, FORWARD
from ganglion.decide.schedules.pipeline.flush import one_in_turn
from ganglion.decide.schedules.pipeline.listed import Entry, ListedSchedule
from ganglion.decide.schedules.pipeline.stage_map import StageMap
from ganglion.errors import LayoutError


class Interleaved(ListedSchedule):
    """1F1B over `chunks` stages a rank."""

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
        order = one_in_turn(forwards, backwards, self._num_ahead)
        return [entry for entry in order if entry[2] < num_microbatches]

    @property
    def _num_ahead(self) -> int:
        """How many forwards come before the first backward."""
        num_ranks, num_chunks = self.stage_map.num_ranks, self.stage_map.num_chunks
        behind = num_ranks - 1 - self.rank
        return 1 + (behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * num_ranks)

    @property
    def live_bound(self) -> int | None:
        """Those of the warm-up, in chunks."""
        return self._num_ahead
