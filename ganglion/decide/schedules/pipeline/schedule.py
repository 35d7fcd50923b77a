"""The contract of a schedule, and the state that all schedules share.

A schedule is a state machine for one rank. It takes events and returns actions; it knows no clock,
moves no bytes and runs the same under the simulator and the engine:

    schedule.admit(8)                     a batch of 8 microbatches may enter
    while not schedule.done:
        action = schedule.next()          an action to start now, or None: wait
        schedule.on_arrival(message)      an activation or a gradient arrived
        schedule.on_finish(action)        an action started earlier has ended

Each lane runs one action at a time, so `next()` may be called while other lanes are busy, and
actions may end in any order. Microbatches are numbered from 0 through all batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from ganglion.decide.schedules.pipeline.action import (
    BACKWARD,
    COMM,
    COMPUTE,
    FORWARD,
    HOST,
    REDUCE,
    UPDATE,
    WEIGHT,
    Action,
    Message,
    Order,
    action,
)
from ganglion.errors import LayoutError


@dataclass(frozen=True, slots=True)
class StageMap:
    """Which stages each rank holds; stages are numbered along the model.

    A rank holds one stage, or `num_chunks` of them, dealt round robin or `folded` back (V):

        3 ranks, 2 chunks      looped  rank 0: 0 3    V  rank 0: 0 5
                                       rank 1: 1 4       rank 1: 1 4
                                       rank 2: 2 5       rank 2: 2 3
    """

    num_ranks: int
    num_chunks: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise LayoutError(
                f"{self.num_ranks} ranks with {self.num_chunks} stages each are no pipeline; use "
                f"1 or more of both"
            )

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        chunk, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.folded and chunk % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of the model."""
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(
                f"stage {rank} of {self.num_ranks} stages does not exist; use 0 or more"
            )
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


class Chunk:
    """The state of one stage of a rank."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.inputs: set[int] = set()  # microbatches whose activation arrived and is unused
        self.gradients: deque[int] = deque()  # those whose gradient arrived, in order of arrival
        self.awaiting_weight: set[int] = set()  # those that lack only their weight gradients
        self.num_begun = 0  # forwards
        self.backwards_left: dict[int, int] = {}  # by batch
        self.num_reducible = 0  # batches with all backwards done, and all before them too
        self.num_reduced = 0  # batches with gradients summed over the replicas
        self.version = 0


class RankSchedule(ABC):
    """The state of one rank: batches, versions, lanes; subclasses choose the next computation."""

    splits_backward = False
    # Whether a batch ends before the next begins.
    flushes = True
    # Whether the version of a microbatch depends on its batch only, not on when it enters.
    versions_by_batch = True

    def __init__(self, rank: int, stage_map: StageMap) -> None:
        """Schedule the stages that `stage_map` gives to `rank`."""
        self.rank = rank
        self.stage_map = stage_map
        stages = stage_map.stages_of(rank)
        self._chunks = {stage: Chunk(stage, stage_map.num_stages) for stage in stages}
        self._batch_of: dict[int, int] = {}  # microbatches of batches that are not updated yet
        self._members: dict[int, range] = {}  # the same the other way round
        self._num_batches = 0
        self._num_admitted = 0
        self._admitting = True
        self._to_reduce: deque[Action] = deque()
        self._to_update: deque[Action] = deque()
        self._busy: set[str] = set()
        self.num_live = 0

    # --- what a subclass decides -------------------------------------------------------------

    @abstractmethod
    def _choose(self) -> Action | None:
        """Return a computation to start now, for which `_is_ready` holds, or None."""

    @property
    @abstractmethod
    def live_bound(self) -> int | None:
        """The most stages x microbatches between forward and backward; None: a whole batch."""

    @property
    def version_bound(self) -> int:
        """The most weight versions a stage keeps at once; one if a schedule flushes."""
        return 1

    def _version_of_batch(self, batch: int) -> int:
        """Return how many updates the weights of a batch have seen."""
        return batch

    @property
    def staleness(self) -> int:
        """How many updates old the weights of a batch are, once the pipeline is full."""
        later = 1000
        return later - self._version_of_batch(later)

    # --- the contract ------------------------------------------------------------------------

    def begin_at(self, batch: int, microbatch: int) -> None:
        """Continue a run at this batch and microbatch; weights have seen `batch` updates."""
        assert not self._batch_of, "nothing has entered yet"
        self._num_batches, self._num_admitted = batch, microbatch
        for chunk in self._chunks.values():
            chunk.version = chunk.num_reducible = chunk.num_reduced = batch
            chunk.num_begun = microbatch

    def admit(self, num_microbatches: int) -> None:
        """Admit one more batch of microbatches."""
        if num_microbatches < 1:
            raise LayoutError(f"a batch of {num_microbatches} microbatches is empty; use 1 or more")
        batch = self._num_batches
        members = range(self._num_admitted, self._num_admitted + num_microbatches)
        self._members[batch] = members
        self._batch_of.update(dict.fromkeys(members, batch))
        for chunk in self._chunks.values():
            chunk.backwards_left[batch] = num_microbatches
        self._num_admitted += num_microbatches
        self._num_batches += 1

    def stop_admitting(self) -> None:
        """Admit no more batches."""
        self._admitting = False

    @property
    def done(self) -> bool:
        """Whether all admitted work has ended and none will follow."""
        return not self._admitting and not self._busy and not self._batch_of

    def batch_of(self, microbatch: int) -> int:
        """Return the batch of a microbatch that is not updated yet."""
        return self._batch_of[microbatch]

    def version_of(self, microbatch: int) -> int:
        """Return the weights that forward and backward of a microbatch use."""
        return self._version_of_batch(self._batch_of[microbatch])

    def next(self) -> Action | None:
        """Return an action to start now on its idle lane, or None until something happens."""
        busy = self._busy
        chosen = None if COMPUTE in busy else self._choose()
        if chosen is None:
            if self._to_reduce and COMM not in busy:
                chosen = self._to_reduce[0]
            elif self._to_update and HOST not in busy:
                chosen = self._to_update[0]
            else:
                return None
        self.begin(chosen)
        return chosen

    def on_arrival(self, message: Message) -> None:
        """Record an activation or a gradient."""
        chunk = self._chunks[message.stage]
        if message.kind == FORWARD:
            chunk.inputs.add(message.microbatch)
        else:
            chunk.gradients.append(message.microbatch)

    def on_finish(self, finished: Action) -> None:
        """Record the end of an action."""
        self._busy.discard(finished.lane)
        kind, chunk = finished.kind, self._chunks[finished.stage]
        if kind == BACKWARD:
            if self.splits_backward:
                chunk.awaiting_weight.add(finished.index)
            else:
                self._end_backward(chunk, finished.index)
        elif kind == FORWARD:
            if chunk.is_last:
                chunk.gradients.append(finished.index)  # the loss is here: its gradient is ready
        elif kind == WEIGHT:
            self._end_backward(chunk, finished.index)
        elif kind == REDUCE:
            self._end_reduce(chunk, finished.index)
        elif kind == UPDATE:
            self._end_update(chunk, finished.index)

    # --- what a follower needs ---------------------------------------------------------------

    def may_begin(self, wanted: Action) -> bool:
        """Return whether an action chosen by the leader can start here now."""
        if wanted.lane in self._busy:
            return False
        if wanted.lane == COMPUTE:  # the leader may be ahead, in a batch not admitted here yet
            return wanted.index in self._batch_of and self._is_ready(wanted)
        return wanted in (self._to_reduce if wanted.kind == REDUCE else self._to_update)

    def begin(self, chosen: Action) -> None:
        """Record that an action starts now."""
        self._busy.add(chosen.lane)
        kind, chunk = chosen.kind, self._chunks[chosen.stage]
        if kind == FORWARD:
            chunk.inputs.discard(chosen.index)
            chunk.num_begun += 1
            self.num_live += 1
        elif kind == BACKWARD:
            chunk.gradients.remove(chosen.index)
        elif kind == WEIGHT:
            chunk.awaiting_weight.remove(chosen.index)
        elif kind == REDUCE:
            self._to_reduce.remove(chosen)
        else:
            self._to_update.remove(chosen)

    # --- inside ------------------------------------------------------------------------------

    def _is_ready(self, wanted: Action) -> bool:
        """Return whether the inputs and the weights of a computation are here."""
        chunk, microbatch = self._chunks[wanted.stage], wanted.index
        if wanted.kind == BACKWARD:
            return microbatch in chunk.gradients
        if wanted.kind == WEIGHT:
            return microbatch in chunk.awaiting_weight
        here = chunk.is_first or microbatch in chunk.inputs
        return here and self.version_of(microbatch) <= chunk.version

    def _end_backward(self, chunk: Chunk, microbatch: int) -> None:
        self.num_live -= 1
        batch = self._batch_of[microbatch]
        chunk.backwards_left[batch] -= 1
        # Reduce in the order of batches, which all replicas share: reductions must match.
        while chunk.backwards_left.get(chunk.num_reducible) == 0:
            del chunk.backwards_left[chunk.num_reducible]
            self._to_reduce.append(action(REDUCE, chunk.stage, chunk.num_reducible))
            chunk.num_reducible += 1

    def _end_reduce(self, chunk: Chunk, batch: int) -> None:
        chunk.num_reduced = batch + 1
        # Clipping needs the norm over all stages, so the stages of a rank are updated together.
        if all(other.num_reduced > batch for other in self._chunks.values()):
            self._to_update.extend(action(UPDATE, stage, batch) for stage in self._chunks)

    def _end_update(self, chunk: Chunk, batch: int) -> None:
        chunk.version = batch + 1
        if all(other.version > batch for other in self._chunks.values()):
            for microbatch in self._members.pop(batch):
                del self._batch_of[microbatch]


class StageSchedule(RankSchedule):
    """A schedule with one stage per rank."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, StageMap(num_stages))
        self.stage = stage
        self.num_stages = num_stages
        self._chunk = self._chunks[stage]
        self.is_first = self._chunk.is_first
        self.is_last = self._chunk.is_last

    @property
    def version(self) -> int:
        """How many updates the newest weights have seen."""
        return self._chunk.version

    def _ready_forward(self) -> int | None:
        """Return the next microbatch to go forward, in order, if input and weights are here."""
        chunk = self._chunk
        microbatch = chunk.num_begun
        if microbatch >= self._num_admitted:
            return None
        if not chunk.is_first and microbatch not in chunk.inputs:
            return None
        return microbatch if self.version_of(microbatch) <= chunk.version else None

    def _forward(self, microbatch: int) -> Action:
        return action(FORWARD, self.stage, microbatch)

    def _backward(self, microbatch: int) -> Action:
        return action(BACKWARD, self.stage, microbatch)


class Follower:
    """Starts what the leader of a tensor group started, in the leader's order.

    The ranks of a group run the same collectives inside a forward, but messages reach them in
    different orders; ranks that each ran what came first would mismatch. So the leader sends what
    it starts as ORDER messages, and a follower starts the head of its orders once its inputs are
    there:

        leader      next() -> 1F3, started   ~~~~ORDER 1F3~~~~>   follower  take(ORDER 1F3)
                                                                            next() -> 1F3

    The order holds across lanes: an update changes the weights that the next forward gathers, so a
    follower that swapped the two would gather once too often.
    """

    def __init__(self, schedule: RankSchedule) -> None:
        """Wrap `schedule`, which keeps the state; orders replace its choices."""
        self.schedule = schedule
        self._orders: deque[Action] = deque()

    def next(self) -> Action | None:
        """Return the oldest order if it can start now, else None."""
        if not self._orders or not self.schedule.may_begin(self._orders[0]):
            return None
        chosen = self._orders.popleft()
        self.schedule.begin(chosen)
        return chosen

    def take(self, order: Order) -> None:
        """Record an order; all other events go to the schedule itself."""
        self._orders.append(order.action)
