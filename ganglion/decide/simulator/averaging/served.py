"""A served centre on a virtual clock: round robin, first come first served, and without a lock."""

from __future__ import annotations

import heapq

from ganglion.decide.plan import ROUND_ROBIN
from ganglion.decide.schedules.exchanges import (
    EXCHANGE,
    FIRST_COME,
    JOIN,
    PUSH,
    Refuse,
    Repeat,
    Request,
    ServedCenter,
)
from ganglion.decide.simulator.averaging.costs import AveragingCosts
from ganglion.decide.simulator.averaging.methods import AveragingMethod
from ganglion.decide.simulator.averaging.result import (
    READ,
    STEP,
    WRITE,
    AveragingEvent,
    AveragingLog,
    AveragingSimulation,
)

_BEGIN, _ASKED, _READ, _SERVED = "begin", "asked", "read", "served"


class _Center:
    """A ServedCenter with every worker a member and requests numbered."""

    def __init__(self, num_workers: int, order: str) -> None:
        self.turns = ServedCenter(num_workers, order)
        for worker in range(num_workers):
            self.turns.arrive(Request(JOIN, worker))
            self.turns.next()
        self._numbers = [0] * num_workers

    def ask(self, kind: str, worker: int, seen: int) -> None:
        """Queue the next request of a worker that has seen version `seen`."""
        self._numbers[worker] += 1
        self.turns.arrive(Request(kind, worker, self._numbers[worker], seen))

    def serve(self, time_s: float, kind: str, step: int) -> AveragingEvent:
        """Execute the request whose turn it is."""
        action = self.turns.next()
        assert action is not None and not isinstance(action, Repeat), "a worker waits for its turn"
        worker = action.request.worker
        is_refused = isinstance(action, Refuse)
        staleness = action.staleness
        return AveragingEvent(time_s, kind, worker, step, action.version, staleness, is_refused)


class RoundRobin:
    """Original EASGD: one worker at a time, by number; watches the host."""

    def __init__(self, method: AveragingMethod, costs: AveragingCosts, num_workers: int) -> None:
        self._costs, self._overlaps = costs, method.overlaps
        self._weights_s = costs.weights_s(method.is_packed)
        self._center = _Center(num_workers, ROUND_ROBIN)
        self._free_s = [0.0] * num_workers
        self._seen = [0] * num_workers
        self._log = AveragingLog()

    def run(self, name: str, num_batches: int) -> AveragingSimulation:
        """Return the simulation of one turn per batch."""
        num_workers, now_s = len(self._free_s), 0.0
        for turn in range(num_batches):
            now_s = self._turn(now_s, turn % num_workers, turn // num_workers)
        total_s = max(now_s, *self._free_s)
        return self._log.close(name, num_workers, num_batches, total_s)

    def _turn(self, now_s: float, worker: int, step: int) -> float:
        """Simulate one turn; return when the host has updated the centre."""
        costs = self._costs
        data_s, moved_s = costs.data_s(), 2 * self._weights_s
        pass_s = costs.pass_of(worker, step, max(now_s, self._free_s[worker]) + data_s)
        # A lone worker may still be busy with its last update.
        late_s = max(0.0, self._free_s[worker] - now_s)
        exposed_s = max(0.0, late_s + pass_s - moved_s) if self._overlaps else late_s + pass_s
        here_s = 0.0 if self._overlaps else costs.update_s  # the host waits for it
        end_s = now_s + data_s + moved_s + exposed_s + here_s + costs.host_center_s
        self._log.spend(
            data_host_dev=data_s,
            param_host_dev=moved_s,
            fwd_bwd=exposed_s,
            upd_dev=here_s,
            upd_host=costs.host_center_s,
        )
        step_s = end_s + (costs.update_s if self._overlaps else 0.0)
        self._free_s[worker] = step_s
        self._center.ask(EXCHANGE, worker, self._seen[worker])
        event = self._center.serve(end_s, EXCHANGE, step)
        assert event.worker == worker, "round robin goes by number"
        self._seen[worker] = event.version
        self._log.events += [event, AveragingEvent(step_s, STEP, worker, step, event.version)]
        return end_s


class Served:
    """Async and Hogwild methods: every worker at its own pace; watches worker 0."""

    def __init__(
        self, method: AveragingMethod, costs: AveragingCosts, num_workers: int, tau: int
    ) -> None:
        """Begin at time 0; a worker exchanges in one of `tau` steps."""
        self._costs, self._tau, self._overlaps = costs, tau, method.overlaps
        self._is_elastic, self._has_lock = method.is_elastic, method.has_lock
        self._weights_s = costs.weights_s(method.is_packed)
        self._center = _Center(num_workers, FIRST_COME)
        self._log = AveragingLog()
        self._agenda: list[tuple[float, int, str, int]] = []
        self._num_planned = 0
        self._num_left = 0
        self._steps = [0] * num_workers
        self._ends_s = [0.0] * num_workers  # of the passes
        self._seen = [0] * num_workers
        self._server_free_s = 0.0
        self._last_s = 0.0

    def run(self, name: str, num_batches: int) -> AveragingSimulation:
        """Return the simulation; workers begin passes until no batches are left."""
        self._num_left = num_batches
        happen = {
            _BEGIN: self._begin,
            _ASKED: self._asked,
            _READ: self._read,
            _SERVED: self._served,
        }
        for worker in range(len(self._steps)):
            self._plan(0.0, _BEGIN, worker)
        while self._agenda:
            now_s, _, what, worker = heapq.heappop(self._agenda)
            happen[what](now_s, worker)
        return self._log.close(name, len(self._steps), num_batches, self._last_s)

    def _plan(self, time_s: float, what: str, worker: int) -> None:
        heapq.heappush(self._agenda, (time_s, self._num_planned, what, worker))
        self._num_planned += 1

    def _begin(self, now_s: float, worker: int) -> None:
        """Begin a pass; workers that overlap send their weights during it, others after it."""
        self._last_s = max(self._last_s, now_s)
        if self._num_left == 0:
            return
        self._num_left -= 1
        data_s = self._costs.data_s()
        pass_s = self._costs.pass_of(worker, self._steps[worker], now_s + data_s)
        self._ends_s[worker] = now_s + data_s + pass_s
        if worker == 0:
            self._log.spend(data_host_dev=data_s, fwd_bwd=pass_s)
        if self._has_turn(self._steps[worker]):
            self._plan(now_s if self._overlaps else self._ends_s[worker], _ASKED, worker)
        else:
            self._step_alone(worker)

    def _has_turn(self, step: int) -> bool:
        """Return whether a step exchanges: elastic workers before it, others after it."""
        return (step if self._is_elastic else step + 1) % self._tau == 0

    def _step_alone(self, worker: int) -> None:
        """End a step without an exchange."""
        done_s = self._ends_s[worker] + self._costs.update_s
        if worker == 0:
            self._log.spend(upd_dev=self._costs.update_s)
        step = AveragingEvent(done_s, STEP, worker, self._steps[worker], self._seen[worker])
        self._log.events.append(step)
        self._steps[worker] += 1
        self._plan(done_s, _BEGIN, worker)

    def _asked(self, now_s: float, worker: int) -> None:
        update_s = self._costs.host_center_s
        if not self._has_lock:
            self._plan(now_s + self._weights_s, _READ, worker)
            return
        self._center.ask(self._kind(), worker, self._seen[worker])
        begin_s = max(now_s, self._server_free_s)
        self._server_free_s = begin_s + 2 * self._weights_s + update_s
        self._plan(begin_s + self._weights_s + update_s, _SERVED, worker)

    def _read(self, now_s: float, worker: int) -> None:
        """Read the centre without a lock; the update follows after its computation."""
        if self._is_elastic:
            version = self._center.turns.version
            self._seen[worker] = version
            event = AveragingEvent(now_s, READ, worker, self._steps[worker], version)
            self._log.events.append(event)
        self._plan(now_s + self._costs.host_center_s, _SERVED, worker)

    def _served(self, now_s: float, worker: int) -> None:
        kind = self._kind()
        if not self._has_lock:
            self._center.ask(kind, worker, self._seen[worker])
            kind = WRITE if self._is_elastic else kind
        event = self._center.serve(now_s, kind, self._steps[worker])
        assert event.worker == worker, "all wait for the same time, so the first comes first"
        self._seen[worker] = event.version
        self._log.events.append(event)
        self._reply(now_s + self._weights_s, worker)

    def _reply(self, reply_s: float, worker: int) -> None:
        """Deliver the answer to the worker, which updates if it is elastic and goes on."""
        costs, end_s = self._costs, self._ends_s[worker]
        waited_s = max(0.0, reply_s - end_s)
        host_s = min(waited_s, costs.host_center_s)
        update_s = costs.update_s if self._is_elastic else 0.0
        done_s = max(reply_s, end_s) + update_s
        if worker == 0:
            self._log.spend(param_host_dev=waited_s - host_s, upd_host=host_s, upd_dev=update_s)
        if self._is_elastic:
            step = AveragingEvent(done_s, STEP, worker, self._steps[worker], self._seen[worker])
            self._log.events.append(step)
        self._steps[worker] += 1
        # Planned, not done at once: requests of others may come before.
        self._plan(done_s, _BEGIN, worker)

    def _kind(self) -> str:
        """Return the kind of request: without a lock, an elastic worker pushes its change."""
        return EXCHANGE if self._is_elastic and self._has_lock else PUSH
