"""Message-driven schedules: run what has arrived, within a limit on what is in flight.

There is no fixed order. AxoNN (IPDPS 22) injects up to `limit` microbatches into the first stage,
and every stage runs what arrives. PipeDream-2BW (2006.09503) caps each stage by its position and
never flushes: a batch uses weights that are one update old, so the pipeline stays full during
updates.

    2BW, version of a batch      batch    0  1  2  3  4
                                 version  0  0  1  2  3
"""

from __future__ import annotations

from abc import abstractmethod

from ganglion.decide.schedules.pipeline.action import BACKWARD, FORWARD, Action, Message
from ganglion.decide.schedules.pipeline.schedule import StageSchedule
from ganglion.errors import ConfigError, LayoutError

BACKWARD_FIRST = "backward"
FORWARD_FIRST = "forward"
ARRIVAL_ORDER = "arrival"
PRIORITIES = (BACKWARD_FIRST, FORWARD_FIRST, ARRIVAL_ORDER)


class ReadyFirst(StageSchedule):
    """Chooses among what is ready: by default backward first, which frees memory soonest."""

    def __init__(self, stage: int, num_stages: int, priority: str = BACKWARD_FIRST) -> None:
        """Schedule `stage` of `num_stages`; `priority` decides between forward and backward."""
        super().__init__(stage, num_stages)
        if priority not in PRIORITIES:
            raise ConfigError(f"priority {priority!r} is not one of {list(PRIORITIES)}")
        self._priority = priority
        self._num_arrived = 0
        self._arrivals: dict[tuple[str, int], int] = {}  # (kind, microbatch) -> order of arrival

    @property
    @abstractmethod
    def _cap(self) -> int:
        """The most live microbatches; at that number no forward starts."""

    def on_arrival(self, message: Message) -> None:
        """Record a message and its order of arrival."""
        super().on_arrival(message)
        if self._priority == ARRIVAL_ORDER:
            self._arrivals[message.kind, message.microbatch] = self._num_arrived
            self._num_arrived += 1

    def on_finish(self, finished: Action) -> None:
        """Record the end of an action."""
        super().on_finish(finished)
        self._arrivals.pop((finished.kind, finished.index), None)

    def _choose(self) -> Action | None:
        forward = self._ready_forward() if self.num_live < self._cap else None
        gradients = self._chunk.gradients
        if not gradients:
            return None if forward is None else self._forward(forward)
        backward = gradients[0]
        if forward is None or self._prefers(backward, forward):
            return self._backward(backward)
        return self._forward(forward)

    def _prefers(self, backward: int, forward: int) -> bool:
        """Return whether the backward goes before the forward.

        On the last stage it always does. In arrival order the first stage refills at once: its
        forward follows the backward that made room, as in the released AxoNN.
        """
        if self.is_last:
            return True
        if self._priority != ARRIVAL_ORDER:
            return self._priority == BACKWARD_FIRST
        if self.is_first:
            return False
        return self._arrivals[BACKWARD, backward] < self._arrivals[FORWARD, forward]


class MessageDriven(ReadyFirst):
    """AxoNN: up to `limit` microbatches in one pipeline, flushed after every batch.

    With the paper's limit, the number of stages, ranks idle as soon as messages take time; a higher
    one hides latency and jitter, but keeps more activations on every stage but the last.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        *,
        limit: int | None = None,
        priority: str = BACKWARD_FIRST,
    ) -> None:
        """Schedule `stage` of `num_stages`; `limit` is `num_stages` unless given."""
        super().__init__(stage, num_stages, priority)
        self.limit = num_stages if limit is None else limit
        if self.limit < 1:
            raise LayoutError(f"a limit of {self.limit} lets nothing in; use 1 or more")

    @property
    def _cap(self) -> int:
        return self.limit

    @property
    def live_bound(self) -> int | None:
        """The limit; 1 on the last stage, which goes back at once."""
        return 1 if self.is_last else self.limit


class TwoBW(ReadyFirst):
    """PipeDream-2BW: never flushes, two weight versions, every batch one update behind.

    `extra` raises the paper's cap of one microbatch for this stage and each stage behind it, to
    absorb jitter. A batch needs at least `num_stages + extra` microbatches, so that all those in
    flight belong to two neighbouring batches.
    """

    flushes = False

    def __init__(self, stage: int, num_stages: int, *, extra: int = 0) -> None:
        super().__init__(stage, num_stages)
        if extra < 0:
            raise LayoutError(f"two_bw: a cap raised by {extra} is lower than its least; use 0")
        self.extra = extra

    def admit(self, num_microbatches: int) -> None:
        """Admit one more batch; raise LayoutError if it is too short for two versions."""
        needed = self.num_stages + self.extra
        if num_microbatches < needed:
            raise LayoutError(
                f"two_bw needs at least stages + extra = {self.num_stages} + {self.extra} = "
                f"{needed} microbatches a batch, not {num_microbatches}: raise the number of "
                f"microbatches"
            )
        super().admit(num_microbatches)

    @property
    def _cap(self) -> int:
        return self.num_stages - self.stage + self.extra

    def _version_of_batch(self, batch: int) -> int:
        return max(batch - 1, 0)

    @property
    def live_bound(self) -> int | None:
        """The cap of this stage."""
        return self._cap

    @property
    def version_bound(self) -> int:
        """Two: the one in use and the newest."""
        return 2
