"""The result of a simulated averaging: events in order, and how one rank spent its time.

The events are all that the arithmetic needs, in the order in which it must be done:

    read       a worker's handler reads the centre, without a lock
    write      and moves the centre by the change it computed
    exchange   both at once: the centre moves to a worker, which gets the centre as it was
    push       a gradient changes the centre, and its worker gets the result
    gather     an exchange with all workers at once
    reduce     all gradients change the centre, and all workers get it
    step       a worker's own update, with the centre it got last if that is new

The time is that of one watched rank: the host where it takes all turns, else worker 0. Its own work
counts in full, other work only while the rank waits for it. So counts table 3 of the paper (You,
Buluc, Demmel 2017), where the passes of Original EASGD vanish behind its messages, and the messages
of Sync EASGD 3 behind its passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ganglion.decide.schedules.exchanges import EXCHANGE, PUSH

READ, WRITE, GATHER, REDUCE, STEP = "read", "write", "gather", "reduce", "step"
EVERYONE = -1

PARAM_DEV_DEV, DATA_HOST_DEV, PARAM_HOST_DEV = "param_dev_dev", "data_host_dev", "param_host_dev"
FWD_BWD, UPD_DEV, UPD_HOST = "fwd_bwd", "upd_dev", "upd_host"
BREAKDOWN = (PARAM_DEV_DEV, DATA_HOST_DEV, PARAM_HOST_DEV, FWD_BWD, UPD_DEV, UPD_HOST)
COMMUNICATION = BREAKDOWN[:3]


class AveragingEvent(NamedTuple):
    """One change of a worker or of the centre, which has `version` afterwards."""

    time_s: float
    kind: str
    worker: int
    step: int  # of that worker: its passes are numbered 0, 1, 2 ...
    version: int = 0
    staleness: int = 0
    is_refused: bool = False  # too stale: nothing is applied, the worker gets the centre


@dataclass(frozen=True, slots=True)
class AveragingSimulation:
    """One method on the virtual clock."""

    method: str
    num_workers: int
    num_batches: int
    total_s: float  # until the last worker is done
    events: tuple[AveragingEvent, ...]
    seconds: Mapping[str, float]  # of the rank that is watched, by the names of BREAKDOWN
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def watched_s(self) -> float:
        """The total time of the watched rank."""
        return sum(self.seconds.values())

    @property
    def communication_share(self) -> float:
        """The share of the watched time that was communication."""
        return sum(self.seconds[name] for name in COMMUNICATION) / self.watched_s

    @property
    def batch_s(self) -> float:
        """Seconds per mini-batch, over all workers."""
        return self.total_s / self.num_batches

    def shares(self) -> dict[str, float]:
        """Return the six parts as shares of the watched time."""
        return {name: self.seconds[name] / self.watched_s for name in BREAKDOWN}


class AveragingLog:
    """Collects the events and seconds of a simulation while it runs."""

    def __init__(self) -> None:
        self.events: list[AveragingEvent] = []
        self.seconds = dict.fromkeys(BREAKDOWN, 0.0)

    def spend(self, **seconds: float) -> None:
        """Add to the parts of the watched time."""
        for name, spent_s in seconds.items():
            self.seconds[name] += spent_s

    def close(
        self, method: str, num_workers: int, num_batches: int, total_s: float
    ) -> AveragingSimulation:
        """Return the simulation, its events in order of time."""
        events = tuple(sorted(self.events, key=lambda event: event.time_s))  # stable
        stale = Counter(e.staleness for e in events if e.kind in (WRITE, EXCHANGE, PUSH))
        seconds = dict(self.seconds)
        return AveragingSimulation(
            method, num_workers, num_batches, total_s, events, seconds, stale
        )
