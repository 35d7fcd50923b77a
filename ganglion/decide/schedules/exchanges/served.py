"""The order of requests at a served centre: members, turns, and writes that are too old.

    arrive(request) --> held until its turn --> next() --> Serve | Repeat | Refuse
                                                           version + 1 on every write

A worker numbers its requests 1, 2, 3 ... A repeated number (its reply was lost with the connection)
gets the first reply again and is not applied again.

Each answer carries the number of workers that share the centre, so a record holds departures, too.

Three orders: first come first served; round robin, which is first come with writes in the order of
the workers' numbers; and the replay of a recorded order, which gives a bitwise equal centre.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from ganglion.decide.plan import ROUND_ROBIN
from ganglion.errors import ConfigError, ProtocolError

JOIN = "join"  # become a member; the reply is the centre, where the worker starts
LOOK = "look"  # read the centre for evaluation: not numbered, never held, never recorded
PULL = "pull"  # read the centre for a later push
PUSH = "push"  # write a change made from a centre read before: refused if that is too old
EXCHANGE = "exchange"  # read and write at once, so that the centre read is never old
LEAVE = "leave"  # not a request: a member left, or was lost
RETURN = "return"  # not a request: a member is back, over a new connection
KINDS = (JOIN, LOOK, PULL, PUSH, EXCHANGE)
WRITES = (PUSH, EXCHANGE)
_MEMBERSHIP = (LEAVE, RETURN)

FIRST_COME = "first_come"  # or ROUND_ROBIN
STALENESS_PER_WORKER = 4  # beyond 4 P versions the averaging may diverge


class Request(NamedTuple):
    """A request of a worker; `version` is that of the last centre it saw."""

    kind: str
    worker: int
    number: int = 0
    version: int = 0


class OrderEntry(NamedTuple):
    """One entry of a recorded order; its text is `push 3` or `push 3 refused`."""

    kind: str
    worker: int
    is_served: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.worker}" + ("" if self.is_served else " refused")


class Serve(NamedTuple):
    """Execute the request and reply; the centre has `version` afterwards."""

    request: Request
    version: int
    staleness: int


class Repeat(NamedTuple):
    """Send the last reply to this worker again."""

    request: Request


class Refuse(NamedTuple):
    """Apply nothing and reply with the centre as it is: the worker was `staleness` behind."""

    request: Request
    version: int
    staleness: int
    limit: int


Answer = Serve | Repeat | Refuse


class ServedCenter:
    """The members, requests and versions of one centre, or of one shard of it."""

    def __init__(
        self,
        num_workers: int,
        order: str | Iterable[OrderEntry] = FIRST_COME,
        *,
        max_staleness: int | None = None,
        version: int = 0,
        is_recording: bool = False,
    ) -> None:
        """Expect `num_workers`; `order` is FIRST_COME, ROUND_ROBIN or a recorded order.

        `max_staleness` is 4 per worker if not given; `version` is that of a restored centre.
        """
        if num_workers < 1:
            raise ConfigError(f"num_workers = {num_workers}: a centre needs at least 1 worker")
        if isinstance(order, str) and order not in (FIRST_COME, ROUND_ROBIN):
            raise ConfigError(
                f"order = {order!r}: use {FIRST_COME!r}, {ROUND_ROBIN!r} or a recorded order"
            )
        self.num_workers = num_workers
        self.version = version
        self.members: set[int] = set()
        self.staleness: Counter[int] = Counter()
        self.num_refused = self.num_repeated = self.max_queue = 0
        self.record: list[OrderEntry] | None = [] if is_recording else None
        self._is_round_robin = order == ROUND_ROBIN
        self._replay = None if isinstance(order, str) else deque(order)
        self._max_staleness = max_staleness
        self._ever_joined: set[int] = set()
        self._sharing: set[int] = set()  # members; in a replay, those at the time of the record
        self._answered: dict[int, int] = {}  # the last number answered, also of lost workers
        self._queue: deque[Request] = deque()
        self._repeats: deque[Repeat] = deque()
        self._last_turn = -1

    @property
    def is_done(self) -> bool:
        """Whether all expected workers have joined and all have left."""
        return len(self._ever_joined) >= self.num_workers and not self.members

    @property
    def limit(self) -> int:
        """How many versions behind a push may be."""
        if self._max_staleness is not None:
            return self._max_staleness
        # Workers that left have still added to the staleness of pushes that arrive now.
        return STALENESS_PER_WORKER * max(self.num_workers, len(self.members))

    @property
    def num_shared(self) -> int:
        """How many workers share the centre: those present and those still expected."""
        return max(1, len(self._sharing) + max(0, self.num_workers - len(self._ever_joined)))

    @property
    def awaited(self) -> int | None:
        """The worker that all others wait for, if there is one."""
        if not self._queue:
            return None
        if self._replay is not None:
            return self._replay[0].worker if self._replay else None
        has_all = len(self._ever_joined) >= self.num_workers
        return self._turn() if self._is_round_robin and has_all else None

    def rejoin(self, worker: int, number: int) -> None:
        """Readmit a worker that lost its connection; its next request has `number`.

        A centre restored from a snapshot does not know the worker's numbers and accepts this one.
        """
        self.members.add(worker)
        self._ever_joined.add(worker)
        self._answered.setdefault(worker, number - 1)
        if self._replay is None:
            self._count_member(OrderEntry(RETURN, worker))

    def leave(self, worker: int) -> None:
        """Remove a worker that left or died, with its open requests; what it wrote stays."""
        if worker in self.members and self._replay is None:
            self._count_member(OrderEntry(LEAVE, worker))
        self.members.discard(worker)
        self._queue = deque(held for held in self._queue if held.worker != worker)
        self._repeats = deque(r for r in self._repeats if r.request.worker != worker)

    def arrive(self, request: Request) -> None:
        """Queue a request; raise ProtocolError if this worker may not make it."""
        self._check_member(request)
        if request.kind not in (JOIN, LOOK):
            last = self._answered[request.worker]
            if request.number == last:
                self._repeats.append(Repeat(request))
                return
            if request.number != last + 1:
                raise ProtocolError(
                    f"worker {request.worker} sent request {request.number} ({request.kind}) but "
                    f"the centre answered its request {last} last: start the worker anew, it "
                    f"joins at the centre"
                )
        self._queue.append(request)
        self.max_queue = max(self.max_queue, len(self._queue))

    def next(self) -> Answer | None:
        """Return what to do now, or None: wait for an arrival or a departure."""
        if self._repeats:
            self.num_repeated += 1
            return self._repeats.popleft()
        while self._replay and self._replay[0].kind in _MEMBERSHIP:
            self._count_member(self._replay.popleft())
        for request in self._queue:
            if self._may_go(request):
                self._queue.remove(request)
                return self._settle(request)
        return None

    def _count_member(self, entry: OrderEntry) -> None:
        """Record that a worker left or returned."""
        if entry.kind == LEAVE:
            self._sharing.discard(entry.worker)
        else:
            self._sharing.add(entry.worker)
        if self.record is not None:
            self.record.append(entry)

    def _check_member(self, request: Request) -> None:
        is_member = request.worker in self.members
        if request.kind not in KINDS:
            raise ProtocolError(
                f"worker {request.worker} sent a {request.kind!r}: run one version of Ganglion "
                f"everywhere"
            )
        if request.kind == JOIN and is_member:
            raise ProtocolError(
                f"worker {request.worker} joined twice: give every worker a number of its own"
            )
        if request.kind not in (JOIN, LOOK) and not is_member:
            raise ProtocolError(
                f"worker {request.worker} sent a {request.kind} but is no member: join first"
            )

    def _may_go(self, request: Request) -> bool:
        if request.kind == LOOK:
            return True
        if self._replay is not None:
            head = self._replay[0] if self._replay else None
            return head is not None and (head.kind, head.worker) == (request.kind, request.worker)
        if not self._is_round_robin or request.kind not in WRITES:
            return True
        return len(self._ever_joined) >= self.num_workers and request.worker == self._turn()

    def _turn(self) -> int | None:
        """Return the member whose write is next in a round robin."""
        later = [worker for worker in self.members if worker > self._last_turn]
        return min(later or self.members, default=None)

    def _settle(self, request: Request) -> Answer:
        """Return the answer to a request whose turn it is, and record it."""
        if request.kind == LOOK:
            return Serve(request, self.version, 0)
        staleness = self.version - request.version
        is_served = self._is_acceptable(request, staleness)
        if self.record is not None:
            self.record.append(OrderEntry(request.kind, request.worker, is_served))
        self._answered[request.worker] = request.number
        if request.kind == JOIN:
            self.members.add(request.worker)
            self._ever_joined.add(request.worker)
            self._sharing.add(request.worker)
            return Serve(request, self.version, 0)
        if request.kind in WRITES:
            self._last_turn = request.worker
            self.staleness[max(0, staleness)] += 1
        if not is_served:
            self.num_refused += 1
            return Refuse(request, self.version, staleness, self.limit)
        self.version += request.kind in WRITES
        return Serve(request, self.version, max(0, staleness))

    def _is_acceptable(self, request: Request, staleness: int) -> bool:
        """Return whether to apply a write; a replay repeats the recorded verdict.

        A push with a version that this centre never had was made before it was restored.
        """
        if self._replay is not None:
            return self._replay.popleft().is_served
        return request.kind != PUSH or 0 <= staleness <= self.limit
