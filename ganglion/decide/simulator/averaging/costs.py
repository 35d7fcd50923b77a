"""The costs of averaging: one price for every message and byte, and closed forms of reductions.

With n ranks, a message of m bytes in k parts takes M = k L + m B (L a message, B a byte):

    binomial tree           2 ceil(log2 n) M                    a broadcast and a reduction
    ring                    2 (n-1) k L + 2 (n-1)/n m B         reduce-scatter and all-gather
    two levels              rings inside groups of g, then n/g groups with m/g bytes each

The tree is the paper's (You, Buluc, Demmel 2017, section 5); Thakur, Rabenseifner and Gropp 2005
has the ring.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ganglion.decide.simulator.options import Disturbance, end_of
from ganglion.errors import ConfigError

TREE, RING, TWO_LEVEL = "tree", "ring", "two_level"
REDUCTIONS = (TREE, RING, TWO_LEVEL)

PassSeconds = float | Callable[[int, int], float]
"""Seconds of a forward and backward: always the same, or by worker and step."""


@dataclass(frozen=True, slots=True)
class MessagePrice:
    """The seconds of a message on a link: a fixed part and a part per byte."""

    message_s: float = 0.0
    byte_s: float = 0.0

    def of(self, num_bytes: float, num_parts: int = 1) -> float:
        """Return the seconds of `num_bytes` sent in some parts."""
        return num_parts * self.message_s + num_bytes * self.byte_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingCosts:
    """Times of compute, prices of links, sizes of messages.

    `host_link` joins the host and a worker, `device_link` two workers; batches arrive over
    `data_link`. `host_center_s` and `device_center_s` are updates of the centre. The `rank` of a
    disturbance is a worker.
    """

    pass_s: PassSeconds
    update_s: float = 0.0
    host_center_s: float = 0.0
    device_center_s: float = 0.0
    host_link: MessagePrice = MessagePrice()
    device_link: MessagePrice = MessagePrice()
    data_link: MessagePrice = MessagePrice()
    tensor_bytes: tuple[int, ...] = ()
    batch_bytes: int = 0
    reduction: str = TREE
    group_size: int = 1  # of the inner level of TWO_LEVEL
    disturbances: tuple[Disturbance, ...] = ()

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"reduction = {self.reduction!r} is not one of {list(REDUCTIONS)}")

    @property
    def num_bytes(self) -> int:
        """The size of all weights."""
        return sum(self.tensor_bytes)

    def pass_of(self, worker: int, step: int, start_s: float) -> float:
        """Return the seconds of one forward and backward that begin at `start_s`.

        A disturbance also prolongs the update after the pass; that is included here.
        """
        work_s = self.pass_s(worker, step) if callable(self.pass_s) else self.pass_s
        mine = [one for one in self.disturbances if one.rank == worker]
        if not mine:
            return work_s
        return end_of(work_s + self.update_s, start_s, mine) - start_s - self.update_s

    def data_s(self) -> float:
        """Return the seconds in which a batch reaches its worker."""
        return self.data_link.of(self.batch_bytes) if self.batch_bytes else 0.0

    def num_parts(self, is_packed: bool) -> int:
        """Return how many messages carry the weights: one, or one per tensor."""
        return 1 if is_packed else len(self.tensor_bytes)

    def weights_s(self, is_packed: bool) -> float:
        """Return the seconds in which the weights move between the host and one worker."""
        return self.host_link.of(self.num_bytes, self.num_parts(is_packed))

    def reduction_s(self, num_ranks: int, link: MessagePrice, is_packed: bool) -> float:
        """Return the seconds in which `num_ranks` sum the weights and all get the result."""
        if num_ranks == 1:
            return 0.0
        size, parts = self.num_bytes, self.num_parts(is_packed)
        if self.reduction == TREE:
            return tree_s(num_ranks, link, size, parts)
        if self.reduction == RING:
            return ring_s(num_ranks, link, size, parts)
        return two_level_s(num_ranks, self.group_size, link, size, parts)


def tree_s(num_ranks: int, link: MessagePrice, num_bytes: float, num_parts: int = 1) -> float:
    """Return the seconds of a binomial broadcast and a binomial reduction."""
    return 2 * (num_ranks - 1).bit_length() * link.of(num_bytes, num_parts)


def ring_s(num_ranks: int, link: MessagePrice, num_bytes: float, num_parts: int = 1) -> float:
    """Return the seconds of a ring's reduce-scatter and all-gather."""
    return 2 * (num_ranks - 1) * link.of(num_bytes / num_ranks, num_parts)


def two_level_s(
    num_ranks: int, group_size: int, link: MessagePrice, num_bytes: float, num_parts: int = 1
) -> float:
    """Return the seconds of rings in groups around rings between them, each with its share."""
    if num_ranks % group_size:
        raise ConfigError(
            f"{num_ranks} workers are no groups of group_size = {group_size}: give a divisor"
        )
    inside = ring_s(group_size, link, num_bytes, num_parts)
    between = ring_s(num_ranks // group_size, link, num_bytes / group_size, num_parts)
    return inside + between


def jittered(pass_s: float, deviation: float, seed: int) -> Callable[[int, int], float]:
    """Return pass times that vary around `pass_s` by a share `deviation`, repeatable by seed."""

    def of(worker: int, step: int) -> float:
        drawn = random.Random(f"{seed} {worker} {step}").gauss(1.0, deviation)
        return pass_s * max(0.1, drawn)

    return of
