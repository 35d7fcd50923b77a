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

from dataclasses import replace

from ganglion.decide.simulator.averaging.costs import AveragingCosts, MessagePrice
from ganglion.decide.simulator.averaging.methods import METHODS, ORDERED, TOGETHER, AveragingMethod
from ganglion.decide.simulator.averaging.result import AveragingSimulation
from ganglion.decide.simulator.averaging.served import RoundRobin, Served
from ganglion.decide.simulator.averaging.sync import Synchronous
from ganglion.errors import ConfigError


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
    if is_packed is not None:
        method = replace(method, is_packed=is_packed)
    if overlaps is not None:
        method = replace(method, overlaps=overlaps and method.is_elastic)
    if method.order == ORDERED:
        return RoundRobin(method, costs, num_workers).run(name, num_batches)
    if method.order == TOGETHER:
        return Synchronous(method, costs, num_workers, tau).run(name, num_batches)
    return Served(method, costs, num_workers, tau).run(name, num_batches)


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
