"""The server of a centre: takes whole messages of any worker, writes the centre, replies.

    while somebody is there or expected:
        what did the door hear?  --> books: whose turn?  --> rule: write  --> reply from a copy

It never waits for one worker: a request is worked on when all of it is here, and a reply that its
worker does not take stays with the connection. A worker that dies, talks nonsense or falls silent
is dropped and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ganglion.decide.schedules.exchanges import (
    FIRST_COME,
    JOIN,
    LEAVE,
    LOOK,
    RETURN,
    WRITES,
    Event,
    Refuse,
    Repeat,
    Request,
    Serve,
    ServedCenter,
)
from ganglion.errors import PeerLost, ProtocolError
from ganglion.execute.averaging.served.connections import Door, Gone, Said, Store, place_of
from ganglion.execute.averaging.served.rules import Rule
from ganglion.execute.averaging.served.snapshot import Snapshots
from ganglion.execute.averaging.served.wire import (
    AS_SENT,
    RECALL,
    REMIND,
    REPLY,
    RESTORE,
    TROUBLE,
    Block,
    Envelope,
    Side,
    open_block,
    text_block,
)

logger = logging.getLogger(__name__)

_MAX_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What the server of one shard has seen so far."""

    version: int
    num_exchanges: Counter[int]  # writes by worker
    staleness: Counter[int]
    num_refused: int
    num_repeated: int
    max_queue: int
    lost: dict[int, str]  # workers that did not say goodbye, and how that showed
    received_bytes: int
    apply_s: float  # spent writing the centre


class _Asked(NamedTuple):
    caller: int
    envelope: Envelope
    payload: Tensor


class _Answered(NamedTuple):
    block: Block
    envelope: Envelope


class CenterServer:
    """Serves one centre, or one shard of it, from the thread that calls `serve`."""

    def __init__(
        self,
        center: Tensor,
        rule: Rule,
        store: Store,
        *,
        run_id: str,
        num_workers: int,
        shard: int = 0,
        order: str | Iterable[Event] = FIRST_COME,
        max_staleness: int | None = None,
        version: int = 0,
        timeout_s: float = 300.0,
        listen_on: str | None = None,
        snapshots: Snapshots | None = None,
        is_recording: bool = False,
    ) -> None:
        """Listen, and publish in `store` where; `center` is this server's own from now on.

        It awaits `num_workers`, but any number may come. A worker that owes something and is
        silent for `timeout_s` is dropped.
        """
        self.center = center
        self.books = ServedCenter(
            num_workers,
            order,
            max_staleness=max_staleness,
            version=version,
            is_recording=is_recording,
        )
        self._rule = rule
        self._side = Side("the centre", run_id, shard, center.numel(), center.dtype)
        self._timeout_s = timeout_s
        self._snapshots = snapshots
        self._workers: dict[int, int] = {}  # by caller
        self._hung_up: set[int] = set()  # callers whose last words do not count
        self._callers: dict[int, int] = {}  # by worker, members and those about to be
        self._pending: dict[int, _Asked] = {}  # by worker
        self._answered: dict[int, _Answered] = {}  # by worker
        self._scratch = Block(center.numel(), center.dtype)
        self._heard_s: dict[int, float] = {}
        self._moved_s = time.monotonic()
        self._num_exchanges: Counter[int] = Counter()
        self._lost: dict[int, str] = {}
        self._received_bytes = 0
        self._apply_s = 0.0
        self._door = Door(listen_on)
        store.set(place_of(run_id, shard), self._door.address)

    def serve(self) -> None:
        """Serve until all expected workers have come and all have gone."""
        tick_s = min(_MAX_TICK_S, self._timeout_s / 4)
        self._moved_s = time.monotonic()
        try:
            while not self.books.is_done:
                for event in self._door.events(tick_s):
                    self._take(event)
                self._judge_silence()
        finally:
            self._door.close()
            if self._snapshots is not None:
                self._save(self._snapshots)

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        """Put the centre at `center`, moving as it did or at rest; nobody exchanges now."""
        self.center.copy_(center)
        self._remind(velocity)

    def tensors(self) -> list[Tensor]:
        """Return the centre, what its rule keeps, and the room of answers."""
        answers = [answered.block.payload for answered in tuple(self._answered.values())]
        return [self.center, *self._rule.tensors(), self._scratch.payload, *answers]

    def metrics(self) -> ServerMetrics:
        """Return what was seen so far."""
        books = self.books
        return ServerMetrics(
            version=books.version,
            num_exchanges=Counter(self._num_exchanges),
            staleness=Counter(books.staleness),
            num_refused=books.num_refused,
            num_repeated=books.num_repeated,
            max_queue=books.max_queue,
            lost=dict(self._lost),
            received_bytes=self._received_bytes,
            apply_s=self._apply_s,
        )

    # --- what came ------------------------------------------------------------------------------

    def _take(self, event: Said | Gone) -> None:
        if isinstance(event, Gone):
            worker = self._workers.pop(event.caller, None)
            if worker is not None and self._callers.get(worker) == event.caller:
                self._drop(worker, event.reason)
        elif event.caller not in self._hung_up:
            try:
                self._hear(event)
            except ProtocolError as error:
                self._complain(event.caller, str(error))
        self._pump()

    def _hear(self, event: Said) -> None:
        data = event.arrival.tensor
        self._received_bytes += data.nbytes
        envelope, payload = open_block(data, self._side, self._workers.get(event.caller))
        worker = self._workers[event.caller] = envelope.worker
        self._heard_s[worker] = time.monotonic()
        if envelope.kind == LEAVE:
            self._forget(worker)
        elif envelope.kind == RETURN:
            self._readmit(event.caller, envelope)
        elif envelope.kind in (LOOK, RECALL, RESTORE, REMIND):
            self._answer_beside(event.caller, envelope, payload)
        else:
            self._admit(_Asked(event.caller, envelope, payload))

    def _answer_beside(self, caller: int, envelope: Envelope, payload: Tensor) -> None:
        """Do at once what has no number and changes no version."""
        if envelope.kind in (RESTORE, REMIND):
            self._check_whole(envelope, payload)
        if envelope.kind == RESTORE:
            self.restore(payload)
        elif envelope.kind == REMIND:
            self._remind(payload)
        known = self._rule.state().get("velocity")
        if envelope.kind != RECALL:
            self._scratch.payload.copy_(self.center)
        else:  # buffers have none, and zero is what a centre at rest has
            self._scratch.payload.zero_()
            if known is not None:
                self._scratch.payload[: known.numel()] = known
        reply = self._reply_to(envelope, self.books.version)
        self._send(caller, _Answered(self._scratch, reply))

    def _remind(self, velocity: Tensor | None) -> None:
        self._rule.load({} if velocity is None else {"velocity": velocity.clone()})

    def _admit(self, asked: _Asked) -> None:
        """Hand a request to the books."""
        kind, worker = asked.envelope.kind, asked.envelope.worker
        is_write = kind in WRITES
        if is_write and kind != self._rule.kind:
            raise ProtocolError(
                f"worker {worker} sent a {kind}, but the centre serves a {self._rule.kind}: give "
                f"workers and servers the same method"
            )
        envelope = asked.envelope
        if is_write:
            self._check_whole(envelope, asked.payload)
        self.books.arrive(Request(kind, worker, envelope.number, envelope.version))
        if kind == JOIN:
            self._callers[worker] = asked.caller
        self._pending[worker] = asked

    def _check_whole(self, envelope: Envelope, payload: Tensor) -> None:
        if payload.numel() != self._side.numel:
            raise ProtocolError(
                f"worker {envelope.worker} sent a {envelope.kind} of {payload.numel()} elements, "
                f"but the centre has {self._side.numel}: give both the same model"
            )

    def _readmit(self, caller: int, envelope: Envelope) -> None:
        """Let a worker that lost its connection go on over a new one."""
        worker = envelope.worker
        if worker in self._callers:  # the end of the old connection has not shown yet
            self._door.hang_up(self._callers[worker], at_once=True)
            self._forget(worker)
        self.books.rejoin(worker, envelope.number)
        self._callers[worker] = caller
        self._lost.pop(worker, None)

    # --- what to do -----------------------------------------------------------------------------

    def _pump(self) -> None:
        while (action := self.books.next()) is not None:
            self._moved_s = time.monotonic()
            asked = self._pending.pop(action.request.worker)
            if isinstance(action, Repeat):
                self._repeat(asked)
            else:
                self._settle(asked, action)
                self._save_if_due(action.request.kind)

    def _settle(self, asked: _Asked, action: Serve | Refuse) -> None:
        """Write the centre if that is to be done, and reply from a copy that is kept."""
        worker, kind = action.request.worker, action.request.kind
        block = self._block_of(worker)
        is_write = isinstance(action, Serve) and kind in WRITES
        apply_s, moved = 0.0, None
        if is_write:
            start_s = time.perf_counter()
            self._rule.apply(self.center, asked.payload, asked.envelope.rate, block.payload)
            moved = self._rule.moved()
            apply_s = time.perf_counter() - start_s
            self._apply_s += apply_s
            self._num_exchanges[worker] += 1
        else:
            block.payload.copy_(self.center)
        reply = replace(
            self._reply_to(asked.envelope, action.version),
            is_refused=isinstance(action, Refuse),
            staleness=action.staleness,
            apply_s=apply_s,
            moved=AS_SENT if moved is None else moved,
        )
        self._answered[worker] = _Answered(block, reply)
        self._send(asked.caller, self._answered[worker])

    def _repeat(self, asked: _Asked) -> None:
        worker, number = asked.envelope.worker, asked.envelope.number
        known = self._answered.get(worker)
        if known is None:  # the worker's word was taken for its numbers, and it contradicts itself
            self._complain(asked.caller, f"request {number} was never answered here: join anew")
        else:
            self._send(asked.caller, known)

    def _block_of(self, worker: int) -> Block:
        known = self._answered.get(worker)
        return Block(self._side.numel, self._side.dtype) if known is None else known.block

    def _reply_to(self, envelope: Envelope, version: int) -> Envelope:
        books = self.books
        return replace(
            envelope,
            kind=REPLY,
            version=version,
            rate=0.0,
            queue=books.max_queue,
            members=books.num_shared,
        )

    def _send(self, caller: int, answer: _Answered) -> None:
        envelope = answer.envelope
        data = answer.block.seal(envelope)
        self._door.say(caller, REPLY, data, step=envelope.step, version=envelope.version)

    def _save_if_due(self, kind: str) -> None:
        snapshots = self._snapshots
        if snapshots is not None and kind in WRITES and snapshots.is_due(self.books.version):
            self._save(snapshots)

    def _save(self, snapshots: Snapshots) -> None:
        snapshots.save(self.center, self.books.version, self._rule.state())

    # --- who goes -------------------------------------------------------------------------------

    def _complain(self, caller: int, text: str) -> None:
        """Tell a caller what is wrong with it, and listen to it no more.

        It hangs up when it has read that: to wait for that here would delay the others.
        """
        worker = self._workers.pop(caller, -1)
        self._hung_up.add(caller)
        envelope = Envelope(
            kind=TROUBLE, run_id=self._side.run_id, worker=worker, shard=self._side.shard
        )
        logger.warning("the centre refuses worker %d: %s", worker, text)
        self._door.say(caller, TROUBLE, text_block(envelope, text), step=-1, version=-1)
        if self._callers.get(worker) == caller:
            self._drop(worker, text)

    def _drop(self, worker: int, reason: str) -> None:
        logger.warning("the centre goes on without worker %d: %s", worker, reason)
        self._lost[worker] = reason
        self._forget(worker)

    def _forget(self, worker: int) -> None:
        self.books.leave(worker)
        self._callers.pop(worker, None)
        self._pending.pop(worker, None)
        self._moved_s = time.monotonic()

    def _judge_silence(self) -> None:
        """Drop workers that owe something for too long; raise if nobody is left to wait for."""
        now_s = time.monotonic()
        for worker in tuple(self._callers):
            silent_s = now_s - self._heard_s[worker]
            if worker not in self._pending and silent_s > self._timeout_s:
                self._door.hang_up(self._callers[worker], at_once=True)
                self._drop(worker, f"it was silent for {silent_s:.1f} s")
                self._pump()
        is_idle = not self.books.members or len(self._pending) == len(self._callers)
        if is_idle and not self.books.is_done and now_s - self._moved_s > self._timeout_s:
            raise self._alone()

    def _alone(self) -> PeerLost:
        books = self.books
        awaited = "more workers" if books.awaited is None else f"worker {books.awaited}"
        return PeerLost(
            f"the centre, shard {self._side.shard}, waited {self._timeout_s:g} s for {awaited}: "
            f"{books.num_workers} were expected, {sorted(books.members)} are here; look for the "
            f"first error in the logs of the others"
        )
