"""What travels between ranks in a simulation: messages, and the reductions of the replicas.

A message over a wire of its own arrives after the latency. Over a port that others use too, it
shares the bandwidth (`links.SharedLink`), and so do reductions: a reduction begins when the last
replica has come and ends for all of them when its last transfer is through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import Action, Message
from ganglion.decide.simulator.links import Network, Route, SharedLink
from ganglion.decide.simulator.result import MessageRow


class LinkEnd(NamedTuple):
    """The foretold end of the next transfer on a port; void if the port has changed since."""

    port: Hashable
    generation: int


@dataclass(slots=True)
class _Reduction:
    """The members that have come, and the transfers that are still under way."""

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
    """Moves messages and reductions; what arrives is pushed into the driver's future."""

    def __init__(
        self,
        times: Sequence[StageTimes],
        network: Network | None,
        num_replicas: int,
        push: Push,
        messages: list[MessageRow],
    ) -> None:
        """Begin with nothing under way."""
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
        """Hand over a message of `stage`, which ran at `source`."""
        # A boundary is the same forward and backward: the output of the stage before crosses it.
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

    def reduce(self, now_s: float, place: int, action: Action) -> None:
        """Let one replica join the reduction of its stage; it begins when all have come."""
        reduction = self._reductions.setdefault(action, _Reduction(action))
        reduction.members.append((place, now_s))
        if len(reduction.members) < self._num_replicas:
            return
        transfers = self._network.reduction(action.stage) if self._network else ()
        reduction.num_transfers = len(transfers)
        for transfer in transfers:
            self._enter(now_s, transfer.route, transfer.num_bytes, reduction)
        if not transfers:
            self._end_reduction(now_s + self._times[action.stage].reduce_s, reduction)

    def on_link_end(self, now_s: float, end: LinkEnd) -> None:
        """Take the transfer that ended from its port, unless the port has changed since."""
        link = self._links[end.port]
        if link.generation != end.generation:
            return
        done = link.pop(now_s)
        self._foretell(end.port, link)
        if isinstance(done, _Posted):
            self._arrive(now_s, done)
            return
        done.num_transfers -= 1
        if done.num_transfers == 0:
            self._end_reduction(now_s + self._reduction_latency_s(done.action.stage), done)

    def _arrive(self, sent_s: float, posted: _Posted) -> None:
        arrival_s = sent_s + posted.latency_s
        self._messages.append(
            (
                posted.message,
                posted.num_bytes,
                posted.source,
                posted.target,
                posted.start_s,
                sent_s,
                arrival_s,
            )
        )
        self._push(arrival_s, posted.target, posted.message)

    def _end_reduction(self, end_s: float, reduction: _Reduction) -> None:
        action = reduction.action
        del self._reductions[action]
        for place, start_s in reduction.members:
            self._push(end_s, place, (action, start_s, end_s, action.index, place))

    def _reduction_latency_s(self, stage: int) -> float:
        assert self._network is not None, "only a network has transfers"
        return max(t.route.latency_s for t in self._network.reduction(stage))

    def _enter(
        self, now_s: float, route: Route, num_bytes: float, payload: _Posted | _Reduction
    ) -> None:
        if route.port not in self._links:
            self._links[route.port] = SharedLink(route.bytes_per_s)
        link = self._links[route.port]
        link.add(now_s, num_bytes, payload, route.num_alike)
        self._foretell(route.port, link)

    def _foretell(self, port: Hashable, link: SharedLink[_Posted | _Reduction]) -> None:
        end_s = link.next_end_s()
        if end_s is not None:
            self._push(end_s, -1, LinkEnd(port, link.generation))
