"""Links that several transfers share: each gets its part of the bandwidth while it is under way.

Processor sharing, exact: with n transfers on a link of rate c, each moves c / n bytes a second. A
virtual clock counts the bytes that one transfer could have moved so far, so one that enters at
virtual time v with b bytes leaves at v + b, whoever joins or leaves in between:

    transfers    a ======------======          = full rate, - half the rate
                       b ------

A transfer may stand for several alike ones that are not simulated: it counts that often.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Payload = TypeVar("Payload")


@dataclass(frozen=True, slots=True)
class Route:
    """How bytes get from one rank to another: over a port that others may use too.

    `port` names what is shared; None or an infinite rate means that nothing is. A transfer on this
    route stands for `num_alike`.
    """

    port: Hashable
    bytes_per_s: float
    latency_s: float
    num_alike: float = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a collective moves over one port."""

    route: Route
    num_bytes: float


class Network(Protocol):
    """What the simulator asks about the wires."""

    def route(self, source: int, target: int) -> Route:
        """Return the way of a message between two ranks of the simulation."""

    def reduction(self, stage: int) -> tuple[Transfer, ...]:
        """Return what the reduction of a stage over its replicas moves, port by port."""


class SharedLink(Generic[Payload]):
    """The transfers on one port."""

    def __init__(self, bytes_per_s: float) -> None:
        """Begin idle."""
        self._rate = bytes_per_s
        self._virtual = 0.0
        self._since_s = 0.0
        self._num_added = 0
        self._num_sharing = 0.0
        self._flows: list[tuple[float, int, float, Payload]] = []
        self.generation = 0  # counts changes: an end foretold before a change is void

    def add(self, now_s: float, num_bytes: float, payload: Payload, num_alike: float = 1.0) -> None:
        """Let a transfer enter that stands for `num_alike`."""
        self._advance(now_s)
        end = self._virtual + num_bytes
        heapq.heappush(self._flows, (end, self._num_added, num_alike, payload))
        self._num_added += 1
        self._num_sharing += num_alike

    def pop(self, now_s: float) -> Payload:
        """Take out the transfer that ends first, at the time foretold."""
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
