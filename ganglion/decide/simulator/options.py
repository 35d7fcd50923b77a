"""What a simulation is given besides schedules and times: replicas, a network, disturbances.

Disturbance(rank=1, start_s=5, end_s=8, speed=0)        rank 1 pauses for 3 s
Disturbance(rank=2, speed=0.5)                          rank 2 always takes twice as long
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ganglion.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """From `start_s` to `end_s` a rank computes at `speed` times its own."""

    rank: int
    speed: float
    start_s: float = 0.0
    end_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.speed < math.inf:
            raise ConfigError(
                f"a speed of {self.speed} is not valid: use 0 for a pause, 1 for undisturbed"
            )
        if not 0 <= self.start_s < self.end_s:
            raise ConfigError(
                f"a disturbance from {self.start_s} s to {self.end_s} s has no length; let it end "
                f"after its start"
            )
        if self.speed == 0 and math.isinf(self.end_s):
            raise ConfigError(f"rank {self.rank} would pause for ever: give the pause an end")


def end_of(work_s: float, start_s: float, disturbances: Sequence[Disturbance]) -> float:
    """Return when work begun at `start_s` ends; where disturbances overlap, the slowest counts."""
    edges = sorted({e for d in disturbances for e in (d.start_s, d.end_s) if start_s < e})
    now_s = start_s
    for edge_s in [*edges, math.inf]:
        speed = min((d.speed for d in disturbances if d.start_s <= now_s < d.end_s), default=1.0)
        if speed > 0 and now_s + work_s / speed <= edge_s:
            return now_s + work_s / speed
        work_s -= (edge_s - now_s) * speed
        now_s = edge_s
    raise AssertionError("a pause has an end")


@dataclass(frozen=True, slots=True)
class Route:
    """How bytes get from one rank to another: over a port that others may share.

    `port` identifies the shared link; None or an infinite rate means that nothing is shared. A
    transfer on this route counts as `num_alike` transfers, of ranks that are not simulated.
    """

    port: Hashable
    bytes_per_s: float
    latency_s: float
    num_alike: float = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The bytes that a collective moves over one port."""

    route: Route
    num_bytes: float


class Network(Protocol):
    """The routes between simulated ranks."""

    def route(self, source: int, target: int) -> Route:
        """Return the route of a message between two simulated ranks."""

    def reduction(self, stage: int) -> tuple[Transfer, ...]:
        """Return what the reduction of a stage over its replicas moves, port by port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Settings of a simulation; without a network, messages take the latency of their stage.

    `blocked_s` has, for each stage, the time for which a rank stops after the last backward of a
    batch and its message, because the engine then sums gradients and updates.
    """

    num_replicas: int = 1
    network: Network | None = None
    disturbances: tuple[Disturbance, ...] = ()
    seed: int = 0
    blocked_s: tuple[float, ...] = ()
