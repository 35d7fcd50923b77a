"""Messages and reductions on their way between simulated ranks.

A message on a link of its own arrives after the latency. On a port that others use too, it shares
the bandwidth, and so do reductions: a reduction begins when the last replica has joined and ends
for all of them when its last transfer has ended.

Sharing is exact: with n transfers on a link of rate c, each moves c / n bytes a second. A virtual
clock counts the bytes that one transfer could have moved so far, so one that enters at virtual time
v with b bytes leaves at v + b, no matter which others join or leave in between:

    transfers    a ======------======          = full rate, - half the rate
                       b ------
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import Action, Message
from ganglion.decide.simulator.options import Network, Route
from ganglion.decide.simulator.result import MessageRow

Payload = TypeVar("Payload")


class SharedLink(Generic[Payload]):
    """The transfers on one port."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._virtual = 0.0
        self._since_s = 0.0
        self._num_added = 0
        self._num_sharing = 0.0
        self._flows: list[tuple[float, int, float, Payload]] = []
        self.generation = 0  # counts changes: an end predicted before a change is void

    def add(self, now_s: float, num_bytes: float, payload: Payload, num_alike: float = 1.0) -> None:
        """Start a transfer that counts as `num_alike`."""
        self._advance(now_s)
        end = self._virtual + num_bytes
        heapq.heappush(self._flows, (end, self._num_added, num_alike, payload))
        self._num_added += 1
        self._num_sharing += num_alike

    def pop(self, now_s: float) -> Payload:
        """Remove and return the transfer that ends first, at the time predicted."""
        self._advance(now_s)
        virtual, _, num_alike, payload = heapq.heappop(self._flows)
        self._virtual = max(self._virtual, virtual)  # rounding must not make it end early
        self._num_sharing = self._num_sharing - num_alike if self._flows else 0.0
        return payload

    def next_end_s(self) -> float | None:
        """Return when the next transfer ends if nothing changes, or None if there is none."""
        if not self._flows:
            return None
        left = max(0.0, self._flows[0][0] - self._virtual)
        return self._since_s + left * self._num_sharing / self._rate

    def _advance(self, now_s: float) -> None:
        if self._flows:
            self._virtual += (now_s - self._since_s) * self._rate / self._num_sharing
        self._since_s = now_s
        self.generation += 1


class LinkEnd(NamedTuple):
    """The predicted end of the next transfer on a port; void if the port has changed since."""

    port: Hashable
    generation: int


@dataclass(slots=True)
class _Reduction:
    """The simulated ranks that have joined, and the transfers that are still under way."""

    action: Action
    members: list[tuple[int, float]] = field(default_factory=list)
    num_transfers: int = 0


@dataclass(frozen=True, slots=True)
class _Posted:
    """A message on a shared port."""

    message: Message
    num_bytes: int
    source: int
    target: int
    start_s: float
    latency_s: float


Push = Callable[[float, int, Any], None]


class Wires:
    """Moves messages and reductions; each arrival is an event pushed to the driver."""

    def __init__(
        self,
        times: Sequence[StageTimes],
        network: Network | None,
        num_replicas: int,
        push: Push,
        messages: list[MessageRow],
    ) -> None:
        self._times = times
        self._latency_s = [stage.latency_s for stage in times]
        self._num_bytes = [stage.message_bytes for stage in times]
        self._network = network
        self._num_replicas = num_replicas
        self._push = push
        self._messages = messages
        self._links: dict[Hashable, SharedLink[_Posted | _Reduction]] = {}
        self._reductions: dict[Action, _Reduction] = {}

    def send(self, now_s: float, message: Message, stage: int, source: int, target: int) -> None:
        """Send a message of `stage`, which ran at `source`."""
        # Forward and backward cross the same boundary: the output of the stage before.
        hop = min(stage, message.stage)
        num_bytes = self._num_bytes[hop]
        if self._network is None or source == target:
            arrival_s = now_s if source == target else now_s + self._latency_s[hop]
            self._messages.append((message, num_bytes, source, target, now_s, now_s, arrival_s))
            self._push(arrival_s, target, message)
            return
        route = self._network.route(source, target)
        posted = _Posted(message, num_bytes, source, target, now_s, route.latency_s)
        if route.port is None or math.isinf(route.bytes_per_s):
            self._arrive(now_s, posted)
        else:
            self._enter(now_s, route, num_bytes, posted)

    def reduce(self, now_s: float, sim_rank: int, action: Action) -> None:
        """Add one replica to the reduction of its stage, which begins when all have joined."""
        reduction = self._reductions.setdefault(action, _Reduction(action))
        reduction.members.append((sim_rank, now_s))
        if len(reduction.members) < self._num_replicas:
            return
        transfers = self._network.reduction(action.stage) if self._network else ()
        reduction.num_transfers = len(transfers)
        for transfer in transfers:
            self._enter(now_s, transfer.route, transfer.num_bytes, reduction)
        if not transfers:
            self._end_reduction(now_s + self._times[action.stage].reduce_s, reduction)

    def on_link_end(self, now_s: float, end: LinkEnd) -> None:
        """End the next transfer of a port, unless the port has changed since the prediction."""
        link = self._links[end.port]
        if link.generation != end.generation:
            return
        done = link.pop(now_s)
        self._predict_end(end.port, link)
        if isinstance(done, _Posted):
            self._arrive(now_s, done)
            return
        done.num_transfers -= 1
        if done.num_transfers == 0:
            assert self._network is not None, "only a network has transfers"
            transfers = self._network.reduction(done.action.stage)
            latency_s = max(transfer.route.latency_s for transfer in transfers)
            self._end_reduction(now_s + latency_s, done)

    def _arrive(self, sent_s: float, posted: _Posted) -> None:
        arrival_s = sent_s + posted.latency_s
        way = (posted.num_bytes, posted.source, posted.target)
        self._messages.append((posted.message, *way, posted.start_s, sent_s, arrival_s))
        self._push(arrival_s, posted.target, posted.message)

    def _end_reduction(self, end_s: float, reduction: _Reduction) -> None:
        action = reduction.action
        del self._reductions[action]
        for sim_rank, start_s in reduction.members:
            self._push(end_s, sim_rank, (action, start_s, end_s, action.index, sim_rank))

    def _enter(
        self, now_s: float, route: Route, num_bytes: float, payload: _Posted | _Reduction
    ) -> None:
        if route.port not in self._links:
            self._links[route.port] = SharedLink(route.bytes_per_s)
        link = self._links[route.port]
        link.add(now_s, num_bytes, payload, route.num_alike)
        self._predict_end(route.port, link)

    def _predict_end(self, port: Hashable, link: SharedLink[_Posted | _Reduction]) -> None:
        end_s = link.next_end_s()
        if end_s is not None:
            self._push(end_s, -1, LinkEnd(port, link.generation))
