"""The server of a centre: receives messages of any worker, writes the centre, replies.

    while workers are connected or expected:
        listener: events --> books: whose turn? --> rule: write --> reply from a copy

It never waits for one worker: a request is handled when all of it has arrived, and a reply that its
worker does not read stays with the connection. A worker that dies, breaks the protocol or falls
silent is dropped, and the others continue.
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
    OrderEntry,
    Refuse,
    Repeat,
    Request,
    Serve,
    ServedCenter,
)
from ganglion.errors import PeerLost, ProtocolError
from ganglion.execute.averaging.served.connections import (
    CenterListener,
    Lost,
    Received,
    Store,
    place_of,
)
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
    Endpoint,
    Envelope,
    open_block,
    text_block,
)

logger = logging.getLogger(__name__)

_MAX_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Counts of the server of one shard, so far."""

    version: int
    num_exchanges: Counter[int]  # writes by worker
    staleness: Counter[int]
    num_refused: int
    num_repeated: int
    max_queue: int
    lost: dict[int, str]  # workers that did not leave by themselves, and how that was noticed
    received_bytes: int
    apply_s: float  # spent writing the centre


class _Request(NamedTuple):
    client: int
    envelope: Envelope
    payload: Tensor


class _Reply(NamedTuple):
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
        order: str | Iterable[OrderEntry] = FIRST_COME,
        max_staleness: int | None = None,
        version: int = 0,
        timeout_s: float = 300.0,
        listen_on: str | None = None,
        snapshots: Snapshots | None = None,
        is_recording: bool = False,
    ) -> None:
        """Listen, publish the address in `store`, and take ownership of `center`.

        `num_workers` are expected, but any number may join. A worker that is silent for
        `timeout_s` while no request of it is pending is dropped.
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
        self._endpoint = Endpoint("the centre", run_id, shard, center.numel(), center.dtype)
        self._timeout_s = timeout_s
        self._snapshots = snapshots
        self._workers: dict[int, int] = {}  # by client
        self._ignored: set[int] = set()  # clients whose further messages do not count
        self._clients: dict[int, int] = {}  # by worker, members and those about to join
        self._pending: dict[int, _Request] = {}  # by worker
        self._answered: dict[int, _Reply] = {}  # by worker
        self._scratch = Block(center.numel(), center.dtype)
        self._heard_s: dict[int, float] = {}
        self._moved_s = time.monotonic()
        self._num_exchanges: Counter[int] = Counter()
        self._lost: dict[int, str] = {}
        self._received_bytes = 0
        self._apply_s = 0.0
        self._listener = CenterListener(listen_on)
        store.set(place_of(run_id, shard), self._listener.address)

    def serve(self) -> None:
        """Serve until all expected workers have joined and all have left."""
        tick_s = min(_MAX_TICK_S, self._timeout_s / 4)
        self._moved_s = time.monotonic()
        try:
            while not self.books.is_done:
                for event in self._listener.events(tick_s):
                    self._on_event(event)
                self._drop_silent()
        finally:
            self._listener.close()
            if self._snapshots is not None:
                self._save(self._snapshots)

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        """Set the centre and its velocity (None for zero); no worker may exchange meanwhile."""
        self.center.copy_(center)
        self._set_velocity(velocity)

    def tensors(self) -> list[Tensor]:
        """Return the centre, the state of its rule, and the buffers of replies."""
        answers = [answered.block.payload for answered in tuple(self._answered.values())]
        return [self.center, *self._rule.tensors(), self._scratch.payload, *answers]

    def metrics(self) -> ServerMetrics:
        """Return the counts so far."""
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

    # --- incoming -------------------------------------------------------------------------------

    def _on_event(self, event: Received | Lost) -> None:
        if isinstance(event, Lost):
            worker = self._workers.pop(event.client, None)
            if worker is not None and self._clients.get(worker) == event.client:
                self._drop(worker, event.reason)
        elif event.client not in self._ignored:
            try:
                self._on_message(event)
            except ProtocolError as error:
                self._report_error(event.client, str(error))
        self._pump()

    def _on_message(self, event: Received) -> None:
        data = event.arrival.tensor
        self._received_bytes += data.nbytes
        envelope, payload = open_block(data, self._endpoint, self._workers.get(event.client))
        worker = self._workers[event.client] = envelope.worker
        self._heard_s[worker] = time.monotonic()
        if envelope.kind == LEAVE:
            self._forget(worker)
        elif envelope.kind == RETURN:
            self._readmit(event.client, envelope)
        elif envelope.kind in (LOOK, RECALL, RESTORE, REMIND):
            self._answer_unnumbered(event.client, envelope, payload)
        else:
            self._admit(_Request(event.client, envelope, payload))

    def _answer_unnumbered(self, client: int, envelope: Envelope, payload: Tensor) -> None:
        """Handle a request that has no number and changes no version."""
        if envelope.kind in (RESTORE, REMIND):
            self._check_whole(envelope, payload)
        if envelope.kind == RESTORE:
            self.restore(payload)
        elif envelope.kind == REMIND:
            self._set_velocity(payload)
        known = self._rule.state().get("velocity")
        if envelope.kind != RECALL:
            self._scratch.payload.copy_(self.center)
        else:  # buffers have no velocity, and a centre at rest has zero
            self._scratch.payload.zero_()
            if known is not None:
                self._scratch.payload[: known.numel()] = known
        reply = self._reply_to(envelope, self.books.version)
        self._send(client, _Reply(self._scratch, reply))

    def _set_velocity(self, velocity: Tensor | None) -> None:
        self._rule.load({} if velocity is None else {"velocity": velocity.clone()})

    def _admit(self, asked: _Request) -> None:
        """Check a request and pass it to the books."""
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
            self._clients[worker] = asked.client
        self._pending[worker] = asked

    def _check_whole(self, envelope: Envelope, payload: Tensor) -> None:
        if payload.numel() != self._endpoint.numel:
            raise ProtocolError(
                f"worker {envelope.worker} sent a {envelope.kind} of {payload.numel()} elements, "
                f"but the centre has {self._endpoint.numel}: give both the same model"
            )

    def _readmit(self, client: int, envelope: Envelope) -> None:
        """Let a worker that lost its connection continue over a new one."""
        worker = envelope.worker
        if worker in self._clients:  # the loss of the old connection has not been noticed yet
            self._listener.disconnect(self._clients[worker], at_once=True)
            self._forget(worker)
        self.books.rejoin(worker, envelope.number)
        self._clients[worker] = client
        self._lost.pop(worker, None)

    # --- replies --------------------------------------------------------------------------------

    def _pump(self) -> None:
        while (action := self.books.next()) is not None:
            self._moved_s = time.monotonic()
            asked = self._pending.pop(action.request.worker)
            if isinstance(action, Repeat):
                self._repeat(asked)
            else:
                self._settle(asked, action)
                self._save_if_due(action.request.kind)

    def _settle(self, asked: _Request, action: Serve | Refuse) -> None:
        """Write the centre if the request is one to write, and reply from a copy that is kept."""
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
        self._answered[worker] = _Reply(block, reply)
        self._send(asked.client, self._answered[worker])

    def _repeat(self, asked: _Request) -> None:
        worker, number = asked.envelope.worker, asked.envelope.number
        known = self._answered.get(worker)
        if known is None:  # a worker that returned gave numbers that contradict each other
            self._report_error(asked.client, f"request {number} was never answered here: join anew")
        else:
            self._send(asked.client, known)

    def _block_of(self, worker: int) -> Block:
        known = self._answered.get(worker)
        return Block(self._endpoint.numel, self._endpoint.dtype) if known is None else known.block

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

    def _send(self, client: int, answer: _Reply) -> None:
        envelope = answer.envelope
        data = answer.block.seal(envelope)
        self._listener.send(client, REPLY, data, step=envelope.step, version=envelope.version)

    def _save_if_due(self, kind: str) -> None:
        snapshots = self._snapshots
        if snapshots is not None and kind in WRITES and snapshots.is_due(self.books.version):
            self._save(snapshots)

    def _save(self, snapshots: Snapshots) -> None:
        snapshots.save(self.center, self.books.version, self._rule.state())

    # --- losses ---------------------------------------------------------------------------------

    def _report_error(self, client: int, text: str) -> None:
        """Send an error to a client and ignore its further messages.

        The client disconnects when it has read that; waiting for it would delay the others.
        """
        worker = self._workers.pop(client, -1)
        self._ignored.add(client)
        envelope = Envelope(
            kind=TROUBLE, run_id=self._endpoint.run_id, worker=worker, shard=self._endpoint.shard
        )
        logger.warning("the centre refuses worker %d: %s", worker, text)
        self._listener.send(client, TROUBLE, text_block(envelope, text), step=-1, version=-1)
        if self._clients.get(worker) == client:
            self._drop(worker, text)

    def _drop(self, worker: int, reason: str) -> None:
        logger.warning("the centre goes on without worker %d: %s", worker, reason)
        self._lost[worker] = reason
        self._forget(worker)

    def _forget(self, worker: int) -> None:
        self.books.leave(worker)
        self._clients.pop(worker, None)
        self._pending.pop(worker, None)
        self._moved_s = time.monotonic()

    def _drop_silent(self) -> None:
        """Drop workers that were silent too long; raise PeerLost if no progress is possible."""
        now_s = time.monotonic()
        for worker in tuple(self._clients):
            silent_s = now_s - self._heard_s[worker]
            if worker not in self._pending and silent_s > self._timeout_s:
                self._listener.disconnect(self._clients[worker], at_once=True)
                self._drop(worker, f"it was silent for {silent_s:.1f} s")
                self._pump()
        is_idle = not self.books.members or len(self._pending) == len(self._clients)
        if is_idle and not self.books.is_done and now_s - self._moved_s > self._timeout_s:
            raise self._alone()

    def _alone(self) -> PeerLost:
        books = self.books
        awaited = "more workers" if books.awaited is None else f"worker {books.awaited}"
        return PeerLost(
            f"the centre, shard {self._endpoint.shard}, waited {self._timeout_s:g} s for "
            f"{awaited}: {books.num_workers} were expected, {sorted(books.members)} are here; look "
            f"for the first error in the logs of the others"
        )
