"""The engine: the driver of a schedule in real time, beside the simulator on a virtual clock.

    while not done:
        action = schedule.next()            something to start now?
        run it, schedule.on_finish(action)  computations and updates block, reductions do not
        or wait for the mailbox             schedule.on_arrival(message)

It decides nothing and computes nothing: the schedule says what comes next, a worker does it, the
transport carries what crosses a boundary. Payloads that arrived wait here until the schedule asks
for their action.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ganglion.comm import Arrival, Transport
from ganglion.errors import CommError, GanglionError, PipelineError, ProtocolError
from ganglion.schedules import RankSchedule
from ganglion.schedules.action import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    UPDATE,
    WEIGHT,
    Action,
    Message,
)
from ganglion.trace import COMPUTE as COMPUTE_LANE
from ganglion.trace import HOST, Recorder

FORWARD_KIND, BACKWARD_KIND, ERROR_KIND = "forward", "backward", "error"
_KINDS = {FORWARD_KIND: FORWARD, BACKWARD_KIND: BACKWARD}
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHT: "weight",
    REDUCE: "reduce",
    UPDATE: "update",
}
# How often a reduction that runs by itself is looked at while there is nothing else to do.
_LOOK_S = 0.0005
_TELLING_S = 1.0


class Worker(Protocol):
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
        """Say whether the sum is there; called again until it is."""

    def update(self, action: Action) -> None:
        """Make the next weights."""

    def take(self, arrival: Arrival) -> bool:
        """Take a message that is no activation or gradient; say whether it was known."""


class Engine:
    """Runs the schedule of one rank."""

    def __init__(
        self,
        schedule: RankSchedule,
        transport: Transport | None,
        rank_at: Callable[[int], int],
        worker: Worker,
        recorder: Recorder,
        timeout_s: float,
    ) -> None:
        """Drive `schedule`; `rank_at` gives the rank of the world that holds a stage."""
        self._schedule = schedule
        self._transport = transport
        self._rank_at = rank_at
        self._worker = worker
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._payloads: dict[tuple[str, int, int], Tensor] = {}
        self._reducing: list[Action] = []
        self._num_stages = schedule.stage_map.num_stages
        held = schedule.stage_map.stages_of(schedule.rank)
        self._num_updated = dict.fromkeys(held, 0)  # by stage

    @property
    def num_updated(self) -> int:
        """How many batches all stages of this rank have made weights from."""
        return min(self._num_updated.values())

    def begin_at(self, batch: int, microbatch: int) -> None:
        """Count batches and microbatches from these on."""
        self._schedule.begin_at(batch, microbatch)
        self._num_updated = dict.fromkeys(self._num_updated, batch)

    def admit(self, num_microbatches: int) -> None:
        """Let one more batch enter."""
        self._schedule.admit(num_microbatches)

    def run_until(self, num_updated: int) -> None:
        """Go on until `num_updated` batches have been updated on this rank."""
        try:
            while self.num_updated < num_updated:
                self._look()
                action = self._schedule.next()
                if action is None:
                    self._wait()
                else:
                    self._run(action)
        except Exception as error:
            self._tell(error)
            raise

    # --- actions -------------------------------------------------------------------------------

    def _run(self, action: Action) -> None:
        start_s = self._recorder.clock()
        try:
            if action.kind == REDUCE:
                self._worker.start_reduce(action)
                self._reducing.append(action)
                return
            version = self._do(action)
        except GanglionError:
            raise
        except Exception as error:
            what = "batch" if action.kind in (REDUCE, UPDATE) else "microbatch"
            raise PipelineError(
                f"{_NAMES[action.kind]} of stage {action.stage}, {what} {action.index} failed on "
                f"rank {self._rank_at(action.stage)}: {type(error).__name__}: {error}"
            ) from error
        self._record(action, start_s, version)
        self._schedule.on_finish(action)

    def _do(self, action: Action) -> int:
        if action.kind == UPDATE:
            self._worker.update(action)
            self._num_updated[action.stage] = action.index + 1
            return action.index + 1
        version = self._schedule.version_of(action.index)
        key = (action.kind, action.stage, action.index)
        if action.kind == FORWARD:
            output = self._worker.forward(action, version, self._payloads.pop(key, None))
            self._send(FORWARD_KIND, action.stage + 1, action.index, version, output)
        elif action.kind == BACKWARD:
            gradient = self._worker.backward(action, version, self._payloads.pop(key, None))
            self._send(BACKWARD_KIND, action.stage - 1, action.index, version, gradient)
        else:
            self._worker.weight(action, version)
        return version

    def _send(
        self, kind: str, stage: int, microbatch: int, version: int, tensor: Tensor | None
    ) -> None:
        if tensor is None or not 0 <= stage < self._num_stages:
            return
        assert self._transport is not None, "several stages have a transport between them"
        self._transport.post(
            self._rank_at(stage),
            kind,
            tensor,
            step=self._schedule.batch_of(microbatch),
            stage=stage,
            microbatch=microbatch,
            version=version,
        )

    def _record(self, action: Action, start_s: float, version: int) -> None:
        is_update = action.kind == UPDATE
        batch = action.index if is_update else self._schedule.batch_of(action.index)
        self._recorder.add(
            COMPUTE_LANE if action.lane == COMPUTE else HOST,
            _NAMES[action.kind],
            start_s,
            self._recorder.clock(),
            step=batch,
            stage=action.stage,
            microbatch=-1 if is_update else action.index,
            version=version,
        )

    # --- waiting -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take what has come, so that the schedule chooses among all that is there."""
        if self._reducing:
            self._end_reductions()
        while self._transport is not None and (arrival := self._transport.poll()) is not None:
            self.take(arrival)

    def _wait(self) -> None:
        """Return when something happened: an arrival, or perhaps the end of a reduction."""
        if self._transport is None:
            if not self._reducing:
                raise ProtocolError("the schedule waits, but there is nobody to wait for")
            time.sleep(_LOOK_S)
        elif self._reducing:
            arrival = self._transport.poll(_LOOK_S)
            if arrival is not None:
                self.take(arrival)
        else:
            self.take(self._transport.receive(self._timeout_s, "activations and gradients"))

    def _end_reductions(self) -> None:
        for action in list(self._reducing):
            if self._worker.is_reduced(action):
                self._reducing.remove(action)
                self._schedule.on_finish(action)

    def take(self, arrival: Arrival) -> None:
        """Hand a message to whom it concerns: the schedule, or the worker."""
        header = arrival.header
        if header.kind == ERROR_KIND:
            raise PipelineError(bytes(arrival.tensor.tolist()).decode())
        kind = _KINDS.get(header.kind)
        if kind is None:
            if not self._worker.take(arrival):
                raise ProtocolError(
                    f"rank {arrival.source} sent {header}, which no stage of this rank awaits"
                )
            return
        self._payloads[kind, header.stage, header.microbatch] = arrival.tensor
        message = Message(kind, header.stage, header.microbatch, header.version)
        self._schedule.on_arrival(message)

    def _tell(self, error: Exception) -> None:
        """Let every rank of the pipeline know what happened here; it would wait in vain."""
        if self._transport is None or isinstance(error, CommError):
            return  # a lost peer shows itself to everybody
        text = str(error) if isinstance(error, GanglionError) else repr(error)
        told = f"{text} (told by rank {self._transport.rank})".encode()
        payload = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        for peer in self._transport.peers:
            with contextlib.suppress(CommError):
                self._transport.post(peer, ERROR_KIND, payload)
        with contextlib.suppress(CommError):
            self._transport.flush(_TELLING_S)
