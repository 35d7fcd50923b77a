"""The engine: the driver of a schedule in real time, beside the simulator on a virtual clock.

    while not done:
        look into the mailbox               schedule.on_arrival(message)
        actions = schedule.next(), ...      something to start now, at most one on each lane?
        run them, schedule.on_finish(...)   computations and updates block, reductions do not
        or wait for the mailbox

It decides nothing and computes nothing: the schedule chooses the next action, `StageActions` do it,
the transport carries what crosses a boundary. Payloads that arrived wait here until the schedule
asks for their action. Failures are posted to all ranks (`alarm`); those of others are raised here.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from ganglion.decide.schedules.pipeline import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    UPDATE,
    Action,
    Follower,
    ForwardOnly,
    Message,
    RankSchedule,
)
from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm import Arrival, Transport, timeout_error
from ganglion.execute.pipeline.engine.action_errors import naming_action, note_action
from ganglion.execute.pipeline.engine.agreement import ORDER_KIND, Agreement
from ganglion.execute.pipeline.engine.alarm import (
    ERROR_KIND,
    LISTEN_S,
    Alarm,
    Patience,
    gets_done,
    leave,
    posted_error,
)
from ganglion.execute.pipeline.engine.ledger import PREDICT_KIND, ForwardOnlyInputs, Ledger
from ganglion.trace import Recorder

# (action, activations or None on the first stage): run a forward; return what goes on, if anything.
Predict = Callable[[Action, Tensor | None], Tensor | None]


class StageActions(Protocol):
    """What does the actions of one rank."""

    def forward(self, action: Action, version: int, hidden: Tensor | None) -> Tensor | None:
        """Run a forward; return what goes to the next stage."""

    def backward(self, action: Action, version: int, gradient: Tensor | None) -> Tensor | None:
        """Run a backward, or its input half; return what goes to the stage before."""

    def weight(self, action: Action, version: int) -> None:
        """Run the weight half of a backward."""

    def start_reduce(self, action: Action) -> None:
        """Start to sum the gradients of a batch over the replicas."""

    def is_reduced(self, action: Action) -> bool:
        """Return whether the sum is there; called again until it is."""

    def update(self, action: Action) -> None:
        """Make the next weights."""

    def take(self, arrival: Arrival) -> bool:
        """Take a message that is no activation or gradient; return whether it was known."""


FORWARD_KIND, BACKWARD_KIND = "forward", "backward"
_KINDS = {FORWARD_KIND: FORWARD, BACKWARD_KIND: BACKWARD}
# How often a reduction that runs by itself is looked at while there is nothing else to do: at once
# for a moment, as most end within it, then now and then.
_LINGER_S = 0.0002
_LOOK_S = 0.0005


class Engine:
    """Runs the schedule of one rank."""

    def __init__(
        self,
        schedule: RankSchedule,
        transport: Transport | None,
        rank_at: Callable[[int], int],
        actions: StageActions,
        recorder: Recorder,
        timeout_s: float,
        *,
        siblings: Transport | None = None,
        agreement: Agreement | None = None,
        in_turn: bool = False,
    ) -> None:
        """Drive `schedule`; `rank_at` gives the rank of the world that holds a stage.

        `transport` reaches the pipeline; `siblings`, the same stage of other replicas, is used for
        alarms only. With an `agreement`, the leader of a tensor group decides. With `in_turn`,
        evaluations run in an order that does not depend on arrivals.
        """
        self._schedule = schedule
        self._agreement = agreement
        self._in_turn = in_turn
        is_led = agreement is not None and not agreement.leads
        self._follower = Follower(schedule) if is_led else None
        self._transport = transport
        self._rank_at = rank_at
        self._actions = actions
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._alarm = Alarm(transport, siblings)
        self._leaving = weakref.finalize(self, leave, self._alarm)
        self._payloads: dict[tuple[str, int, int], Tensor] = {}
        self._forward_only = ForwardOnlyInputs()
        self._reducing: list[Action] = []
        self._patience = Patience(timeout_s, self._lost)
        self._num_stages = schedule.stage_map.num_stages
        held = schedule.stage_map.stages_of(schedule.rank)
        self._ledger = Ledger(held, self._num_stages)
        self._num_updated = dict.fromkeys(held, 0)  # by stage

    @property
    def num_updated(self) -> int:
        """How many batches all stages of this rank have made weights from."""
        return min(self._num_updated.values())

    def begin_at(self, batch: int, microbatch: int) -> None:
        """Count batches and microbatches from these on."""
        self._schedule.begin_at(batch, microbatch)
        self._ledger.begin_at(microbatch)
        self._num_updated = dict.fromkeys(self._num_updated, batch)

    def admit(self, num_microbatches: int) -> None:
        """Let one more batch enter."""
        self._schedule.admit(num_microbatches)
        self._ledger.admit(num_microbatches)

    def run_until(self, num_updated: int, is_reported: Callable[[], bool] = lambda: True) -> None:
        """Go on until `num_updated` batches have been updated on this rank and are reported.

        What other ranks report comes by itself; later batches go on meanwhile.
        """
        with self.telling():
            while self.num_updated < num_updated:
                self._look()
                if not self._start_all():
                    self._wait()
            # What enters after the report may come too late for its turn: do not go past it.
            may_start = self._schedule.versions_by_batch
            awaiting = f"the numbers of step {num_updated - 1} of all ranks"
            self._idle_until(is_reported, awaiting, may_start=may_start)

    def run_forwards(self, microbatches: range, predict: Predict) -> None:
        """Take microbatches through all stages, forward only: evaluation and generation.

        They are numbered through all such runs, for a rank may be ahead of the next.
        """
        rank, stage_map = self._schedule.rank, self._schedule.stage_map
        schedule = ForwardOnly(rank, stage_map, microbatches, in_turn=self._in_turn)
        self._forward_only.begin(schedule)
        with self.telling():
            while not schedule.done:
                self._look()
                action = schedule.next()
                if action is None:
                    self._await("activations to evaluate")
                    continue
                self._predict(action, predict)
                schedule.on_finish(action)
        self._forward_only.end(microbatches)

    def wait_for(self, is_done: Callable[[], bool], awaiting: str) -> None:
        """Return when something that runs by itself is done; meanwhile alarms are heard."""
        with self.telling():
            self._patience.reset()
            self._idle_until(is_done, awaiting)

    def close(self) -> None:
        """Close the transports."""
        self._leaving.detach()
        self._alarm.close()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Post a failure inside to every rank.

        A lost peer may have posted its own error: then that is raised.
        """
        try:
            yield
        except CommError as error:
            cause = self._alarm.heard()
            self._alarm.ring(cause or error)
            if cause is None:
                raise
            raise cause from error
        except Exception as error:
            self._alarm.ring(error)
            raise

    # --- actions -------------------------------------------------------------------------------

    def _start_all(self) -> bool:
        """Start the actions that can start now, one on each lane; return whether there was any.

        Reductions go first, so that they are under way while this rank computes.
        """
        if self._follower is not None:
            return self._follow(self._follower)
        started, computation = False, None
        while (action := self._schedule.next()) is not None:
            started = True
            if action.lane == COMPUTE:
                computation = action  # its lane is taken now: what follows is on other lanes
            else:
                self._run(action)
        if computation is not None:
            self._run(computation)
        return started

    def _follow(self, follower: Follower) -> bool:
        """Start what the leader of the group started, one after the other."""
        started = False
        while (action := follower.next()) is not None:
            started = True
            self._run(action)
        return started

    def _run(self, action: Action) -> None:
        self._patience.reset()
        if self._agreement is not None and self._agreement.leads:
            self._agreement.announce(action)
        start_s = self._recorder.clock()
        with naming_action(action, self._rank_at(action.stage)):
            if action.kind == REDUCE:
                self._actions.start_reduce(action)
                self._reducing.append(action)
                return
            version = self._do(action)
        if self._recorder.enabled:
            self._record(action, start_s, version)
        self._schedule.on_finish(action)

    def _do(self, action: Action) -> int:
        if action.kind == UPDATE:
            self._actions.update(action)
            self._end_update(action)
            return action.index + 1
        version = self._schedule.version_of(action.index)
        key = (action.kind, action.stage, action.index)
        if action.kind == FORWARD:
            output = self._actions.forward(action, version, self._payloads.pop(key, None))
            self._ledger.went_forward(action.stage, action.index)
            self._send(FORWARD_KIND, action.stage + 1, action.index, version, output)
        elif action.kind == BACKWARD:
            gradient = self._actions.backward(action, version, self._payloads.pop(key, None))
            self._send(BACKWARD_KIND, action.stage - 1, action.index, version, gradient)
        else:
            self._actions.weight(action, version)
        return version

    def _predict(self, action: Action, predict: Predict) -> None:
        self._patience.reset()
        with naming_action(action, self._rank_at(action.stage)):
            output = predict(action, self._forward_only.pop(action))
        if output is not None:
            self._post(PREDICT_KIND, action.stage + 1, output, step=-1, microbatch=action.index)

    def _end_update(self, action: Action) -> None:
        before = self.num_updated
        self._num_updated[action.stage] = action.index + 1
        for _ in range(before, self.num_updated):
            self._ledger.end_batch()

    def _send(
        self, kind: str, stage: int, microbatch: int, version: int, tensor: Tensor | None
    ) -> None:
        if tensor is None or not 0 <= stage < self._num_stages:
            return
        step = self._schedule.batch_of(microbatch)
        self._post(kind, stage, tensor, step=step, microbatch=microbatch, version=version)

    def _post(
        self,
        kind: str,
        stage: int,
        tensor: Tensor,
        *,
        step: int,
        microbatch: int,
        version: int = -1,
    ) -> None:
        assert self._transport is not None, "several stages have a transport between them"
        self._transport.post(
            self._rank_at(stage),
            kind,
            tensor,
            step=step,
            stage=stage,
            microbatch=microbatch,
            version=version,
        )

    def _record(self, action: Action, start_s: float, version: int) -> None:
        is_update = action.kind == UPDATE
        batch = action.index if is_update else self._schedule.batch_of(action.index)
        note_action(self._recorder, action, start_s, batch, version)

    # --- waiting -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take what has come, so that the schedule chooses among all that is there."""
        self._alarm.listen()
        if self._reducing:
            self._end_reductions()
        while self._transport is not None and (arrival := self._transport.poll()) is not None:
            self.take(arrival)

    def _wait(self) -> None:
        """Return when something happened: an arrival, perhaps the end of a reduction or a nap."""
        if self._reducing:
            first = self._reducing[0]
            self._patience.check(f"the reduction of stage {first.stage}, batch {first.index}")
            self._nap()
            return
        self._await(self._ledger.awaited())

    def _idle_until(
        self, is_done: Callable[[], bool], awaiting: str, *, may_start: bool = False
    ) -> None:
        """Return when all ranks have put in what they exchange; with `may_start`, go on meanwhile.

        A rank that has everything may end before this one has looked: its end is no loss then.
        """
        while not is_done():
            try:
                self._look()
                if not (may_start and self._start_all()):
                    self._patience.check(awaiting)
                    self._nap()
            except PeerLost:
                if not gets_done(is_done):
                    raise

    def _await(self, awaiting: str) -> None:
        """Wait for a message, and take it."""
        if self._transport is None:
            raise ProtocolError("the schedule waits, but there is nobody to wait for")
        left_s = self._patience.check(awaiting)
        arrival = self._receive(self._transport, left_s, awaiting)
        if arrival is not None:
            self.take(arrival)

    def _receive(self, transport: Transport, left_s: float, awaiting: str) -> Arrival | None:
        """Wait for a message; with a second transport to listen to, for a moment only."""
        if not self._alarm.has_quiet:
            return transport.receive(left_s, awaiting)
        begin_s = time.monotonic()
        try:
            return transport.receive(LISTEN_S, awaiting)
        except PeerLost:
            if time.monotonic() < begin_s + LISTEN_S:
                raise  # a loss, not the end of a short wait
            return None

    def _nap(self) -> None:
        """Let a moment pass, or a message come."""
        if self._patience.is_young(_LINGER_S):
            os.sched_yield()
            return
        if self._transport is None:
            time.sleep(_LOOK_S)
            return
        arrival = self._transport.poll(_LOOK_S)
        if arrival is not None:
            self.take(arrival)

    def _lost(self, awaiting: str) -> PeerLost:
        rank = self._rank_at(self._schedule.stage_map.stages_of(self._schedule.rank)[0])
        others = () if self._transport is None else self._transport.peers
        return timeout_error(rank, others, self._timeout_s, awaiting)

    def _end_reductions(self) -> None:
        for action in list(self._reducing):
            with naming_action(action, self._rank_at(action.stage)):
                if not self._actions.is_reduced(action):
                    continue
            self._patience.reset()
            self._reducing.remove(action)
            self._schedule.on_finish(action)

    def take(self, arrival: Arrival) -> None:
        """Hand a message to the schedule or to the stage actions."""
        header = arrival.header
        if header.kind == ERROR_KIND:
            raise posted_error(arrival)
        self._patience.reset()
        kind = _KINDS.get(header.kind)
        if header.kind.startswith(ORDER_KIND) and self._agreement is not None:
            for order in self._agreement.orders(arrival):
                assert self._follower is not None, "a leader takes no orders"
                self._follower.take(order)
            return
        if header.kind == PREDICT_KIND:
            self._forward_only.take(arrival)
            return
        if kind is None:
            if not self._actions.take(arrival):
                raise ProtocolError(
                    f"rank {arrival.source} sent {header}, which no stage of this rank awaits"
                )
            return
        message = Message(kind, header.stage, header.microbatch, header.version)
        if not self._ledger.is_awaited(message):
            raise ProtocolError(
                f"rank {arrival.source} sent {header}, which no stage of this rank awaits: it has "
                f"come before, or belongs elsewhere"
            )
        self._payloads[kind, header.stage, header.microbatch] = arrival.tensor
        self._schedule.on_arrival(message)
