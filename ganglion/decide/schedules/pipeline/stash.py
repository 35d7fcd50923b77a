"""Weight stashing, the original PipeDream: never flushes, and every stage keeps its own versions.

A forward uses the newest weights of its stage and stashes them for its backward. With batches of
one microbatch, as published (1806.03377), stage i of d keeps d - i versions and its weights are
d - 1 - i updates old. Staleness depends on the stage, which 2BW was made to avoid.

    d = 3, batches of 1      microbatch       0  1  2  3  4
                             version, stage 0 0  0  0  1  2
                             version, stage 2 0  1  2  3  4

Forwards and backwards alternate strictly, and a forward waits for the update of every batch whose
backwards have ended, so versions do not depend on timing.
"""

from __future__ import annotations

from ganglion.decide.schedules.pipeline.action import FORWARD, UPDATE, Action
from ganglion.decide.schedules.pipeline.schedule import StageSchedule


class Stash(StageSchedule):
    """PipeDream with weight stashing, updating after every batch."""

    flushes = False
    versions_by_batch = False

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self._cap = num_stages - stage
        self._least_batch: int | None = None
        self._stashed: dict[int, int] = {}  # versions of the microbatches that have begun

    def admit(self, num_microbatches: int) -> None:
        """Admit one more batch."""
        super().admit(num_microbatches)
        self._least_batch = min(num_microbatches, self._least_batch or num_microbatches)

    def begin(self, chosen: Action) -> None:
        """Record that an action starts now; a forward stashes its version."""
        super().begin(chosen)
        if chosen.kind == FORWARD:
            self._stashed[chosen.index] = self.version

    def on_finish(self, finished: Action) -> None:
        """Record the end of an action; an update drops the stashes of its batch."""
        members = self._members.get(finished.index, range(0))
        super().on_finish(finished)
        if finished.kind == UPDATE:
            for microbatch in members:
                del self._stashed[microbatch]

    def version_of(self, microbatch: int) -> int:
        """Return the weights that a microbatch began with, or would begin with now."""
        return self._stashed.get(microbatch, self.version)

    def _choose(self) -> Action | None:
        begun = self._chunk.num_begun
        if self.num_live < self._cap and begun < self._num_admitted:
            forward = self._forward(begun)
            return forward if self._is_ready(forward) else None
        oldest = begun - self.num_live
        return self._backward(oldest) if oldest in self._chunk.gradients else None

    def _is_ready(self, wanted: Action) -> bool:
        settled = self.version == self._chunk.num_reducible  # no update is outstanding
        return super()._is_ready(wanted) and (settled or wanted.kind != FORWARD)

    def _version_of_batch(self, batch: int) -> int:
        raise AssertionError("versions belong to microbatches here, not to batches")

    @property
    def staleness(self) -> int:
        """How many updates old the oldest weights of a batch are on this stage."""
        return -(-(self._cap - 1) // (self._least_batch or 1))

    @property
    def live_bound(self) -> int | None:
        """One for this stage and for each stage behind it."""
        return self._cap

    @property
    def version_bound(self) -> int:
        """The versions that live microbatches can have seen; one each with batches of one."""
        return self.staleness + 1
