"""Averaging on a virtual clock, for each method of the paper (You, Buluc, Demmel 2017).

    round robin    host | data | centre down, weights up | update |        worker 1, then 2, 3 ...
                   worker      | pass ................ |
    served         worker | pass | push, wait | pass | push, wait |        first come first served
                   server         | in, update, out |                      or all at once, unlocked
    synchronous    worker | pass | broadcast, reduce | update |           version 3: beside a pass

A process sends or receives one message at a time, so a server with a lock is busy with a worker
from its message to the reply; without the lock, every worker has a handler of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ganglion.decide.simulator.averaging.costs import AveragingCosts, MessagePrice
from ganglion.decide.simulator.averaging.result import AveragingSimulation
from ganglion.decide.simulator.averaging.served import RoundRobin, Served
from ganglion.decide.simulator.averaging.sync import Synchronous
from ganglion.errors import ConfigError

ORDERED, SERVED, TOGETHER = "ordered", "served", "together"


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingMethod:
    """How a method exchanges; `order` is ORDERED, SERVED or TOGETHER."""

    order: str
    is_elastic: bool = True
    has_momentum: bool = False
    has_lock: bool = True
    overlaps: bool = False
    is_packed: bool = True
    center_on_host: bool = True


METHODS: Mapping[str, AveragingMethod] = {
    "original_easgd_no_overlap": AveragingMethod(order=ORDERED, is_packed=False),
    "original_easgd": AveragingMethod(order=ORDERED, is_packed=False, overlaps=True),
    "async_sgd": AveragingMethod(order=SERVED, is_elastic=False),
    "async_msgd": AveragingMethod(order=SERVED, is_elastic=False, has_momentum=True),
    "hogwild_sgd": AveragingMethod(order=SERVED, is_elastic=False, has_lock=False),
    "async_easgd": AveragingMethod(order=SERVED, overlaps=True),
    "async_measgd": AveragingMethod(order=SERVED, overlaps=True, has_momentum=True),
    "hogwild_easgd": AveragingMethod(order=SERVED, overlaps=True, has_lock=False),
    "sync_sgd": AveragingMethod(order=TOGETHER, is_elastic=False, center_on_host=False),
    "sync_easgd_1": AveragingMethod(order=TOGETHER),
    "sync_easgd_2": AveragingMethod(order=TOGETHER, center_on_host=False),
    "sync_easgd_3": AveragingMethod(order=TOGETHER, center_on_host=False, overlaps=True),
    "sync_measgd_3": AveragingMethod(
        order=TOGETHER, center_on_host=False, overlaps=True, has_momentum=True
    ),
}
"""The methods of the paper by name, and Sync EASGD 3 with the momentum of Async MEASGD.

Only the original sends layer by layer.
"""


def simulate_averaging(
    name: str,
    costs: AveragingCosts,
    *,
    num_workers: int,
    num_batches: int,
    tau: int = 1,
    is_packed: bool | None = None,
    overlaps: bool | None = None,
) -> AveragingSimulation:
    """Simulate the method `name` with `num_batches` mini-batches, of all workers together.

    `tau` steps lie between two exchanges of a worker; Original EASGD exchanges in every step.
    `is_packed` overrides how the method sends its weights, `overlaps` whether it does so during a
    pass; gradients are sent after their pass in any case.
    """
    method = _checked(name, num_workers, num_batches, tau)
    packed = method.is_packed if is_packed is None else is_packed
    beside = method.is_elastic and (method.overlaps if overlaps is None else overlaps)
    if method.order == TOGETHER:
        together = Synchronous(
            costs,
            num_workers,
            tau,
            is_packed=packed,
            is_elastic=method.is_elastic,
            overlaps=beside,
            center_on_host=method.center_on_host,
        )
        return together.run(name, num_batches)
    if method.order == ORDERED:
        return RoundRobin(costs, num_workers, packed, beside).run(name, num_batches)
    served = Served(
        costs,
        num_workers,
        tau,
        is_packed=packed,
        is_elastic=method.is_elastic,
        has_lock=method.has_lock,
        overlaps=beside,
    )
    return served.run(name, num_batches)


def _checked(name: str, num_workers: int, num_batches: int, tau: int) -> AveragingMethod:
    if name not in METHODS:
        raise ConfigError(f"method = {name!r} is not one of {list(METHODS)}")
    method = METHODS[name]
    if min(num_workers, num_batches, tau) < 1:
        raise ConfigError(
            f"num_workers = {num_workers}, num_batches = {num_batches} and tau = {tau} must be 1 "
            f"or more"
        )
    if tau > 1 and method.order == ORDERED:
        raise ConfigError(
            f"tau = {tau}: Original EASGD lets one worker compute at a time, and exchange each "
            f"time: leave it at 1"
        )
    if method.order == TOGETHER and num_batches % num_workers:
        raise ConfigError(
            f"num_batches = {num_batches} leaves some of {num_workers} synchronous workers "
            f"without a batch: give a multiple"
        )
    return method


def calibrated(
    costs: AveragingCosts, share: float, *, num_workers: int, half_bytes: float
) -> AveragingCosts:
    """Return `costs` with a price of messages at which Original EASGD communicates `share`.

    A message of `half_bytes` takes twice as long as an empty one. Batches are copied ahead, so
    they cost their bytes only.
    """
    low_s, high_s = 0.0, 1.0
    while _share(_priced(costs, high_s, half_bytes), num_workers) < share:
        high_s *= 2
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        is_enough = _share(_priced(costs, middle_s, half_bytes), num_workers) >= share
        low_s, high_s = (low_s, middle_s) if is_enough else (middle_s, high_s)
    return _priced(costs, high_s, half_bytes)


def _priced(costs: AveragingCosts, message_s: float, half_bytes: float) -> AveragingCosts:
    link = MessagePrice(message_s, message_s / half_bytes)
    data = MessagePrice(0.0, link.byte_s)
    return replace(costs, host_link=link, device_link=link, data_link=data)


def _share(costs: AveragingCosts, num_workers: int) -> float:
    done = simulate_averaging(
        "original_easgd", costs, num_workers=num_workers, num_batches=8 * num_workers
    )
    return done.communication_share


def efficiency(
    costs: AveragingCosts, num_workers: int, *, overlaps: bool, num_steps: int = 2
) -> float:
    """Return the share of a lone worker's speed that each of `num_workers` keeps (weak scaling)."""
    name = "sync_easgd_3" if overlaps else "sync_easgd_2"
    runs = (
        simulate_averaging(name, costs, num_workers=workers, num_batches=workers * num_steps)
        for workers in (1, num_workers)
    )
    alone, together = (run.total_s for run in runs)
    return alone / together
