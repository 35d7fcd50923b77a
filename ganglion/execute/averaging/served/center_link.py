"""A worker's end of a served centre: one request at a time, answered once whatever happens.

    link.block.payload.copy_(weights)       # the memory of the message itself
    link.ask(EXCHANGE, step=7, rate=0.1)    # returns at once
    ...                                     # forward and backward
    answer = link.answer()                  # waits, with a deadline

If the connection breaks, or the server is replaced by another, the link calls again and repeats
what is unanswered under the same number; the centre applies it once.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.decide.schedules.exchanges import JOIN, LEAVE, LOOK, RETURN
from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.averaging.served.connections import Phone, Store
from ganglion.execute.averaging.served.wire import (
    RECALL,
    REMIND,
    RESTORE,
    TROUBLE,
    Block,
    Envelope,
    Side,
    open_block,
    text_of,
)

_FAREWELL_S = 1.0
_MAX_LOOKS = 10


class Answer(NamedTuple):
    """The centre's reply; the payload is the receiver's own, and empty if nothing had to come."""

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
        self.side = Side(f"worker {worker}", run_id, shard, numel, dtype)
        self.worker = worker
        self.block = Block(numel, dtype)
        self.version = 0
        self.sent_bytes = 0
        self.num_calls = 0
        self.num_members = 0  # workers that the centre has, as it last said
        self._timeout_s = timeout_s
        self._phone = Phone(store, run_id, worker, shard)
        self._plain = Block(0, dtype)  # for what has no payload
        self._number = 0
        self._asked: tuple[Envelope, bool] | None = None  # what is unanswered
        self._looks = ""  # what is asked beside the numbered requests: a look, a restore
        self._early: Answer | None = None  # came while a look was awaited
        self._is_member = False

    def join(self) -> Tensor:
        """Become a member and return the centre, where this worker has to start."""
        self._ask(self._envelope(JOIN, 0, 0, 0.0), False)
        answer = self._await(0)
        self._is_member = True
        return answer.payload

    def look(self) -> Tensor:
        """Return the centre as it is; what is in flight stays so."""
        return self._ask_beside(LOOK).payload

    def recall(self) -> tuple[Tensor, Tensor]:
        """Return the centre and its velocity, of one version if writes ever pause so long."""
        for _ in range(_MAX_LOOKS):
            velocity, center = self._ask_beside(RECALL), self._ask_beside(LOOK)
            if velocity.envelope.version == center.envelope.version:
                break
        return center.payload, velocity.payload

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        """Put the centre at `center`; nothing may be in flight, of no worker."""
        assert self._asked is None, "one request at a time"
        self.block.payload.copy_(center)
        self._ask_beside(RESTORE)
        if velocity is not None:
            self.block.payload.copy_(velocity)
            self._ask_beside(REMIND)

    def ask(self, kind: str, *, step: int, rate: float = 0.0) -> None:
        """Send a request, with `block.payload`, which must stay as it is until it is answered."""
        assert self._asked is None, "one request at a time"
        self._number += 1
        self._ask(self._envelope(kind, self._number, step, rate), True)

    def answer(self) -> Answer:
        """Wait for the reply to the request."""
        early, self._early = self._early, None
        return early if early is not None else self._await(self._number)

    def leave(self) -> None:
        """Say goodbye if there is anybody to say it to, and hang up."""
        try:
            if self._is_member:
                envelope = self._envelope(LEAVE, 0, 0, 0.0)
                self._phone.say(LEAVE, self._plain.seal(envelope, with_payload=False))
                self._phone.flush(_FAREWELL_S)
        except CommError:
            pass  # the centre is gone: it misses nothing
        self._is_member = False
        self._phone.hang_up()

    # --- parts ---------------------------------------------------------------------------------

    def _envelope(self, kind: str, number: int, step: int, rate: float) -> Envelope:
        return Envelope(
            kind=kind,
            run_id=self.side.run_id,
            worker=self.worker,
            shard=self.side.shard,
            number=number,
            step=step,
            version=self.version,
            rate=rate,
        )

    def _ask_beside(self, kind: str) -> Answer:
        """Ask what has no number and may be asked twice; return what comes back."""
        self._looks = kind
        self._say_beside()
        try:
            return self._await(0)
        finally:
            self._looks = ""

    def _say_beside(self) -> None:
        self._say(self._envelope(self._looks, 0, 0, 0.0), self._looks in (RESTORE, REMIND))

    def _ask(self, envelope: Envelope, with_payload: bool) -> None:
        self._asked = (envelope, with_payload)
        self._say(envelope, with_payload)

    def _say(self, envelope: Envelope, with_payload: bool) -> None:
        """Send, or leave it to the one who waits for the answer to call again and repeat."""
        block = self.block if with_payload else self._plain
        data = block.seal(envelope, with_payload=with_payload)
        try:
            self._phone.say(envelope.kind, data, step=envelope.step, version=envelope.version)
            self.sent_bytes += data.nbytes
        except PeerLost:
            self._phone.hang_up()

    def _await(self, number: int) -> Answer:
        """Wait for the reply with this number; 0 is that to a join or a look."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                remaining_s = max(0.0, end_s - time.monotonic())
                data = self._phone.hear(remaining_s, "an answer of the centre")
            except PeerLost as error:
                if time.monotonic() >= end_s:
                    raise self._unanswered(number) from error
                self._call_again(end_s)
                continue
            answer = self._opened(data)
            if answer.envelope.number == number:
                return answer
            if number != 0:
                raise ProtocolError(
                    f"the centre answered request {answer.envelope.number} of worker "
                    f"{self.worker}, which awaits {number}: start the worker anew"
                )
            self._early = answer

    def _opened(self, data: Tensor) -> Answer:
        answer = Answer(*open_block(data, self.side, None))
        if answer.envelope.kind == TROUBLE:  # said to somebody whose number may be unreadable
            self._is_member = False
            self._phone.hang_up()
            raise ProtocolError(
                f"the centre refuses worker {self.worker}: {text_of(answer.payload)}"
            )
        if answer.envelope.worker != self.worker:
            raise ProtocolError(
                f"worker {self.worker} got an answer for worker {answer.envelope.worker}: give "
                f"every worker a number of its own"
            )
        if not (self._looks and answer.envelope.number == 0):
            self._asked = None
            self.num_members = answer.envelope.members  # not by looks, which no record has
            self.version = answer.envelope.version
        return answer

    def _call_again(self, end_s: float) -> None:
        """Connect, and repeat all that is unanswered."""
        self._phone.call(max(0.001, end_s - time.monotonic()))
        self.num_calls += 1
        if self._is_member:
            next_number = self._number + (self._asked is None)
            self._say(self._envelope(RETURN, next_number, 0, 0.0), False)
        if self._asked is not None:
            self._say(*self._asked)
        if self._looks:
            self._say_beside()

    def _unanswered(self, number: int) -> PeerLost:
        what = f"request {number}" if number else "its call"
        return PeerLost(
            f"worker {self.worker} waited {self._timeout_s:g} s for the centre, shard "
            f"{self.side.shard}, to answer {what}: look for the first error in the log of the "
            f"server, or raise timeout_s"
        )
