"""The order of an update by buckets: read state, update weights, write state back, in three slots.

Optimizer state on a lower tier is read bucket by bucket. Each bucket has a slot from the start of
its read to the end of its write; three are under way together:

    read     |  0  |  1  |  2  |     |  3  |  4  |          bucket 3 takes the slot of bucket 0
    update         .     |  0  |  1  |  2  |  3  |          0 waits for its gradients
    write                      |  0  |  1  |  2  |  3  |

A bucket is updated when its state is read and its gradients are summed. Gradients are summed in
chunks, each one all-reduce, so the first buckets are updated while later chunks are still reduced.
If all gradients must be known first (to clip them, or to detect an overflow), only reads begin
before the verdict; a negative one ends the program with nothing updated and nothing written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

READ = "read"
UPDATE = "update"
WRITE = "write"
NUM_SLOTS = 3


class Move(NamedTuple):
    """A read, an update or a write of one bucket."""

    kind: str
    bucket: int

    def __str__(self) -> str:
        return f"{self.kind} {self.bucket}"


class _Lane:
    """Moves of one kind: in order, one at a time."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.num_begun = 0
        self.num_finished = 0

    @property
    def is_idle(self) -> bool:
        return self.num_begun == self.num_finished

    def begin(self) -> Move:
        self.num_begun += 1
        return Move(self.kind, self.num_begun - 1)

    def finish(self, move: Move) -> None:
        is_under_way = move.bucket == self.num_finished < self.num_begun
        assert is_under_way, f"{move} is not under way"
        self.num_finished += 1


class BucketProgram:
    """Decides the next move; `next` may be called while other moves are unfinished."""

    def __init__(
        self, chunk_of: Sequence[int], *, num_slots: int = NUM_SLOTS, needs_verdict: bool = False
    ) -> None:
        """Update one bucket for each of `chunk_of`: the last chunk of gradients that it needs.

        Chunks are reduced in order from 0. With `needs_verdict` nothing is updated before
        `on_verdict`.
        """
        assert num_slots >= 1, "a bucket needs a slot"
        self._chunk_of = tuple(chunk_of)
        self._num_slots = num_slots
        self._verdict: bool | None = None if needs_verdict else True
        self._num_reduced = 0
        self._read, self._update, self._write = _Lane(READ), _Lane(UPDATE), _Lane(WRITE)
        self._lanes = {lane.kind: lane for lane in (self._read, self._update, self._write)}

    @property
    def num_buckets(self) -> int:
        """How many buckets the update has."""
        return len(self._chunk_of)

    @property
    def done(self) -> bool:
        """Whether all is written, or the verdict was negative and no read is under way."""
        if self._verdict is False:
            return self._read.is_idle
        return self._verdict is True and self._write.num_finished == self.num_buckets

    @property
    def is_touched(self) -> bool:
        """Whether a weight was changed, so that the update cannot be undone."""
        return self._update.num_begun > 0

    def slot_of(self, bucket: int) -> int:
        """Return the slot that a bucket has while it is under way."""
        return bucket % self._num_slots

    def next(self) -> Move | None:
        """Return a move to begin now, or None: wait for an event."""
        if self._may_write():
            return self._write.begin()
        if self._may_update():
            return self._update.begin()
        if self._may_read():
            return self._read.begin()
        return None

    def on_finish(self, move: Move) -> None:
        """Record that a move is finished."""
        self._lanes[move.kind].finish(move)

    def on_reduced(self, chunk: int) -> None:
        """Record that a chunk of gradients holds its sums; chunks come in order."""
        assert chunk == self._num_reduced, f"chunk {chunk} after {self._num_reduced} chunks"
        self._num_reduced += 1

    def on_verdict(self, go: bool) -> None:
        """Allow the update to begin, or end the program."""
        assert self._verdict is None, "there is one verdict, and only if one is needed"
        self._verdict = go

    def _may_read(self) -> bool:
        bucket = self._read.num_begun
        has_slot = bucket < min(self.num_buckets, self._write.num_finished + self._num_slots)
        return has_slot and self._read.is_idle and self._verdict is not False

    def _may_update(self) -> bool:
        bucket = self._update.num_begun
        if not self._verdict or not self._update.is_idle or bucket == self._read.num_finished:
            return False
        return self._chunk_of[bucket] < self._num_reduced

    def _may_write(self) -> bool:
        return self._write.is_idle and self._write.num_begun < self._update.num_finished
