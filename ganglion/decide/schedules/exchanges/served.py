"""How a served centre takes turns: who is a member, whose request is next, what came too late.

    arrive(request) --> held until its turn --> next() --> Serve | Repeat | Refuse
                                                           version + 1 on every write

A worker numbers its requests 1, 2, 3 ... A number that comes again (its reply was lost with the
connection) is answered with the reply of the first time and not applied again.

Who leaves is missed from the next answer on: workers learn with each how many share the centre, and
so a record holds departures, too.

Three orders: first come first served; round robin, which is first come with the writes forced into
the order of the workers' numbers; and the replay of a recorded order, which gives the same centre
to the last bit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from ganglion.decide.plan import ROUND_ROBIN
from ganglion.errors import ConfigError, ProtocolError

JOIN = "join"  # become a member; the reply is the centre, where the worker starts
LOOK = "look"  # read the centre for evaluation: has no number, is never held, never recorded
PULL = "pull"  # read the centre for a later push
PUSH = "push"  # write what was made from a centre read before: refused if that is too old
EXCHANGE = "exchange"  # read and write at once, so that what is read is never old
LEAVE = "leave"  # be no member any more: said, or found out; no request
RETURN = "return"  # be one again, over a new connection; no request
KINDS = (JOIN, LOOK, PULL, PUSH, EXCHANGE)
WRITES = (PUSH, EXCHANGE)
_PASSING = (LEAVE, RETURN)

FIRST_COME = "first_come"  # or ROUND_ROBIN
STALENESS_PER_WORKER = 4  # beyond 4 P versions the averaging may grow instead of shrink


class Request(NamedTuple):
    """What a worker asks for; `version` is that of the last centre it saw."""

    kind: str
    worker: int
    number: int = 0
    version: int = 0


class Event(NamedTuple):
    """One entry of a recorded order; its text is `push 3` or `push 3 refused`."""

    kind: str
    worker: int
    is_served: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.worker}" + ("" if self.is_served else " refused")


class Serve(NamedTuple):
    """Carry the request out and reply; the centre has `version` afterwards."""

    request: Request
    version: int
    staleness: int


class Repeat(NamedTuple):
    """Send the last reply to this worker again."""

    request: Request


class Refuse(NamedTuple):
    """Apply nothing, and reply with the centre as it is: the worker was `staleness` behind."""

    request: Request
    version: int
    staleness: int
    limit: int


Action = Serve | Repeat | Refuse


class ServedCenter:
    """The books of one centre, or of one shard of it; pure: no weights, no clock, no messages."""

    def __init__(
        self,
        num_workers: int,
        order: str | Iterable[Event] = FIRST_COME,
        *,
        max_staleness: int | None = None,
        version: int = 0,
        is_recording: bool = False,
    ) -> None:
        """Await `num_workers`; `order` is FIRST_COME, ROUND_ROBIN or what was recorded.

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
        self.record: list[Event] | None = [] if is_recording else None
        self._is_round_robin = order == ROUND_ROBIN
        self._script = None if isinstance(order, str) else deque(order)
        self._max_staleness = max_staleness
        self._ever: set[int] = set()
        self._sharing: set[int] = set()  # members, in a replay those of the moment recorded
        self._numbers: dict[int, int] = {}  # the last number that was answered, also of the dead
        self._held: deque[Request] = deque()
        self._repeats: deque[Repeat] = deque()
        self._last_turn = -1

    @property
    def is_done(self) -> bool:
        """Whether all who were expected have come, and nobody is left."""
        return len(self._ever) >= self.num_workers and not self.members

    @property
    def limit(self) -> int:
        """How many versions behind a push may be."""
        if self._max_staleness is not None:
            return self._max_staleness
        # Who left has still made what is being pushed now old.
        return STALENESS_PER_WORKER * max(self.num_workers, len(self.members))

    @property
    def num_shared(self) -> int:
        """How many workers draw at the centre: those that are here, or still expected."""
        return max(1, len(self._sharing) + max(0, self.num_workers - len(self._ever)))

    @property
    def awaited(self) -> int | None:
        """The worker all others wait for, if there is one."""
        if not self._held:
            return None
        if self._script is not None:
            return self._script[0].worker if self._script else None
        has_all = len(self._ever) >= self.num_workers
        return self._turn() if self._is_round_robin and has_all else None

    def rejoin(self, worker: int, number: int) -> None:
        """Let a worker that lost its connection, not its life, be a member again.

        It will ask next, or again, for `number`. A centre restored from a snapshot knows nothing of
        the worker's numbers and takes its word.
        """
        self.members.add(worker)
        self._ever.add(worker)
        self._numbers.setdefault(worker, number - 1)
        if self._script is None:
            self._pass(Event(RETURN, worker))

    def leave(self, worker: int) -> None:
        """Forget a worker that left or died, and what it had asked for; what it gave stays."""
        if worker in self.members and self._script is None:
            self._pass(Event(LEAVE, worker))
        self.members.discard(worker)
        self._held = deque(held for held in self._held if held.worker != worker)
        self._repeats = deque(r for r in self._repeats if r.request.worker != worker)

    def arrive(self, request: Request) -> None:
        """Take a request in; ProtocolError if this worker may not make it."""
        self._check_member(request)
        if request.kind not in (JOIN, LOOK):
            last = self._numbers[request.worker]
            if request.number == last:
                self._repeats.append(Repeat(request))
                return
            if request.number != last + 1:
                raise ProtocolError(
                    f"worker {request.worker} sent request {request.number} ({request.kind}) but "
                    f"the centre answered its request {last} last: start the worker anew, it "
                    f"joins at the centre"
                )
        self._held.append(request)
        self.max_queue = max(self.max_queue, len(self._held))

    def next(self) -> Action | None:
        """Return what to do now, or None until something arrives or somebody leaves."""
        if self._repeats:
            self.num_repeated += 1
            return self._repeats.popleft()
        while self._script and self._script[0].kind in _PASSING:
            self._pass(self._script.popleft())
        for request in self._held:
            if self._may_go(request):
                self._held.remove(request)
                return self._settle(request)
        return None

    # --- parts ---------------------------------------------------------------------------------

    def _pass(self, event: Event) -> None:
        """Count a worker out, or in again."""
        if event.kind == LEAVE:
            self._sharing.discard(event.worker)
        else:
            self._sharing.add(event.worker)
        if self.record is not None:
            self.record.append(event)

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
        if self._script is not None:
            head = self._script[0] if self._script else None
            return head is not None and (head.kind, head.worker) == (request.kind, request.worker)
        if not self._is_round_robin or request.kind not in WRITES:
            return True
        return len(self._ever) >= self.num_workers and request.worker == self._turn()

    def _turn(self) -> int | None:
        """Return the member whose write is next in a round robin."""
        later = [worker for worker in self.members if worker > self._last_turn]
        return min(later or self.members, default=None)

    def _settle(self, request: Request) -> Action:
        """Decide on a request whose turn it is, and write the books."""
        if request.kind == LOOK:
            return Serve(request, self.version, 0)
        staleness = self.version - request.version
        is_served = self._is_acceptable(request, staleness)
        if self.record is not None:
            self.record.append(Event(request.kind, request.worker, is_served))
        self._numbers[request.worker] = request.number
        if request.kind == JOIN:
            self.members.add(request.worker)
            self._ever.add(request.worker)
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
        """Say whether a write may go ahead; a replay repeats the verdict that was recorded.

        A push that saw a version this centre never had comes from before it was restored.
        """
        if self._script is not None:
            return self._script.popleft().is_served
        return request.kind != PUSH or 0 <= staleness <= self.limit


def parse_order(text: str) -> list[Event]:
    """Read a recorded order, one event a line."""
    events = []
    for number, line in enumerate(text.splitlines(), 1):
        kind, _, rest = line.strip().partition(" ")
        worker, _, verdict = rest.partition(" ")
        is_known = kind in (*KINDS, *_PASSING) and worker.isdecimal() and verdict in ("", "refused")
        if not is_known:
            raise ConfigError(
                f"line {number} of the recorded order is {line!r}: it should be like 'push 3' or "
                f"'push 3 refused'"
            )
        events.append(Event(kind, int(worker), verdict == ""))
    return events
