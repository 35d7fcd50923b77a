"""A worker's end of a served centre: one request at a time, applied exactly once.

    link.block.payload.copy_(weights)       # the memory of the message itself
    link.ask(EXCHANGE, step=7, rate=0.1)    # returns at once
    ...                                     # forward and backward
    answer = link.answer()                  # waits, with a deadline

If the connection breaks, or the server is replaced, the link reconnects and repeats an unanswered
request under the same number; the centre applies it once.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.decide.schedules.exchanges import JOIN, LEAVE, LOOK, RETURN
from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.averaging.served.connections import CenterClient, Store
from ganglion.execute.averaging.served.wire import (
    RECALL,
    REMIND,
    RESTORE,
    TROUBLE,
    Block,
    Endpoint,
    Envelope,
    open_block,
    text_of,
)

_LEAVE_S = 1.0
_MAX_TRIES = 10


class Answer(NamedTuple):
    """The centre's reply; the receiver owns the payload."""

    envelope: Envelope
    payload: Tensor


class CenterLink:
    """The connection of one worker to one shard; it belongs to the worker's thread."""

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        worker: int,
        numel: int,
        dtype: torch.dtype,
        shard: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        """Find the centre of `run_id` through `store`; no wait is longer than `timeout_s`."""
        self.endpoint = Endpoint(f"worker {worker}", run_id, shard, numel, dtype)
        self.worker = worker
        self.block = Block(numel, dtype)
        self.version = 0
        self.sent_bytes = 0
        self.num_connections = 0
        self.num_members = 0  # workers of the centre, by its last answer
        self._timeout_s = timeout_s
        self._client = CenterClient(store, run_id, worker, shard)
        self._plain = Block(0, dtype)  # for messages without a payload
        self._number = 0
        self._asked: tuple[Envelope, bool] | None = None  # not answered yet
        self._unnumbered = ""  # kind of the unnumbered request that is awaited
        self._early: Answer | None = None  # came while an unnumbered answer was awaited
        self._is_member = False

    def join(self) -> Tensor:
        """Become a member and return the centre, where this worker must start."""
        self._ask(self._envelope(JOIN, 0, 0, 0.0), False)
        answer = self._await(0)
        self._is_member = True
        return answer.payload

    def look(self) -> Tensor:
        """Return the present centre; a request in flight stays in flight."""
        return self._ask_unnumbered(LOOK).payload

    def recall(self) -> tuple[Tensor, Tensor]:
        """Return the centre and its velocity, of one version unless writes never pause."""
        for _ in range(_MAX_TRIES):
            velocity, center = self._ask_unnumbered(RECALL), self._ask_unnumbered(LOOK)
            if velocity.envelope.version == center.envelope.version:
                break
        return center.payload, velocity.payload

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        """Set the centre; no worker may have a request in flight."""
        assert self._asked is None, "one request at a time"
        self.block.payload.copy_(center)
        self._ask_unnumbered(RESTORE)
        if velocity is not None:
            self.block.payload.copy_(velocity)
            self._ask_unnumbered(REMIND)

    def ask(self, kind: str, *, step: int, rate: float = 0.0) -> None:
        """Send a request with `block.payload`, which must not change until it is answered."""
        assert self._asked is None, "one request at a time"
        self._number += 1
        self._ask(self._envelope(kind, self._number, step, rate), True)

    def answer(self) -> Answer:
        """Wait for the reply to the request."""
        early, self._early = self._early, None
        return early if early is not None else self._await(self._number)

    def leave(self) -> None:
        """Leave the centre, if it is reachable, and disconnect."""
        try:
            if self._is_member:
                envelope = self._envelope(LEAVE, 0, 0, 0.0)
                self._client.send(LEAVE, self._plain.seal(envelope, with_payload=False))
                self._client.flush(_LEAVE_S)
        except CommError:
            pass  # the centre is gone and need not know
        self._is_member = False
        self._client.disconnect()

    # --- parts ---------------------------------------------------------------------------------

    def _envelope(self, kind: str, number: int, step: int, rate: float) -> Envelope:
        return Envelope(
            kind=kind,
            run_id=self.endpoint.run_id,
            worker=self.worker,
            shard=self.endpoint.shard,
            number=number,
            step=step,
            version=self.version,
            rate=rate,
        )

    def _ask_unnumbered(self, kind: str) -> Answer:
        """Send a request without a number, which may be repeated; return its answer."""
        self._unnumbered = kind
        self._send_unnumbered()
        try:
            return self._await(0)
        finally:
            self._unnumbered = ""

    def _send_unnumbered(self) -> None:
        self._send(
            self._envelope(self._unnumbered, 0, 0, 0.0), self._unnumbered in (RESTORE, REMIND)
        )

    def _ask(self, envelope: Envelope, with_payload: bool) -> None:
        self._asked = (envelope, with_payload)
        self._send(envelope, with_payload)

    def _send(self, envelope: Envelope, with_payload: bool) -> None:
        """Send; after a failure, the wait for the answer reconnects and repeats."""
        block = self.block if with_payload else self._plain
        data = block.seal(envelope, with_payload=with_payload)
        try:
            self._client.send(envelope.kind, data, step=envelope.step, version=envelope.version)
            self.sent_bytes += data.nbytes
        except PeerLost:
            self._client.disconnect()

    def _await(self, number: int) -> Answer:
        """Wait for the reply with this number; 0 is that of a join or an unnumbered request."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                remaining_s = max(0.0, end_s - time.monotonic())
                data = self._client.receive(remaining_s, "an answer of the centre")
            except PeerLost as error:
                if time.monotonic() >= end_s:
                    raise self._unanswered(number) from error
                self._reconnect(end_s)
                continue
            answer = self._open(data)
            if answer.envelope.number == number:
                return answer
            if number != 0:
                raise ProtocolError(
                    f"the centre answered request {answer.envelope.number} of worker "
                    f"{self.worker}, which awaits {number}: start the worker anew"
                )
            self._early = answer

    def _open(self, data: Tensor) -> Answer:
        answer = Answer(*open_block(data, self.endpoint, None))
        if answer.envelope.kind == TROUBLE:  # its worker number may be wrong
            self._is_member = False
            self._client.disconnect()
            raise ProtocolError(
                f"the centre refuses worker {self.worker}: {text_of(answer.payload)}"
            )
        if answer.envelope.worker != self.worker:
            raise ProtocolError(
                f"worker {self.worker} got an answer for worker {answer.envelope.worker}: give "
                f"every worker a number of its own"
            )
        if not (self._unnumbered and answer.envelope.number == 0):
            self._asked = None
            self.num_members = answer.envelope.members  # not by looks, which no record holds
            self.version = answer.envelope.version
        return answer

    def _reconnect(self, end_s: float) -> None:
        """Connect, and repeat all unanswered requests."""
        self._client.connect(max(0.001, end_s - time.monotonic()))
        self.num_connections += 1
        if self._is_member:
            next_number = self._number + (self._asked is None)
            self._send(self._envelope(RETURN, next_number, 0, 0.0), False)
        if self._asked is not None:
            self._send(*self._asked)
        if self._unnumbered:
            self._send_unnumbered()

    def _unanswered(self, number: int) -> PeerLost:
        what = f"request {number}" if number else "its call"
        return PeerLost(
            f"worker {self.worker} waited {self._timeout_s:g} s for the centre, shard "
            f"{self.endpoint.shard}, to answer {what}: look for the first error in the log of the "
            f"server, or raise timeout_s"
        )
