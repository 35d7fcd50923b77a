"""The costs of averaging in a plan on a cluster: from the step of a worker to the step of the run.

    step of a worker     the pipeline alone, without a sum over `data`
    exchange             synchronous: a ring along `data` for each column of ranks, all at once;
                         served: what all ranks of a worker hold goes to the servers and back
    every tau steps      the exchange on a virtual clock, hidden by the pass or not

In the Original EASGD of a run all workers compute, and exchange in the order of their numbers;
equal workers arrive in that order anyway, so it is simulated as first come first served. Without a
lock, shared memory is read and written at the rate of the links inside a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ganglion.decide.costs import Cluster, StageTimes, link_between, ring_of
from ganglion.decide.plan import (
    ASYNC_MSGD,
    HOGWILD_EASGD,
    HOGWILD_SGD,
    ORIGINAL_EASGD,
    SYNC_EASGD,
    Plan,
)
from ganglion.decide.simulator.averaging.costs import RING, AveragingCosts, MessagePrice, jittered
from ganglion.decide.simulator.averaging.methods import METHODS
from ganglion.decide.simulator.averaging.result import AveragingSimulation
from ganglion.decide.simulator.averaging.simulate import simulate_averaging
from ganglion.decide.simulator.options import Disturbance
from ganglion.errors import ConfigError

_NUM_ROUNDS = 20  # exchanges of each worker that are simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingFigures:
    """The costs of the exchanges of a plan; `worker_step_s` is a step without any."""

    method: str
    num_workers: int
    servers: int
    tau: int
    exchange_bytes: int  # of one worker, one way
    worker_step_s: float
    step_s: float  # with exchanges, the mean of all
    exchange_s: float  # of one, without contention
    exposed_s: float  # of one, not hidden by a pass, waiting for others included
    exposed_share: float  # of all time
    mean_staleness: float
    num_steps: int  # of each worker that were simulated
    disturbed_s: float = 0.0  # what disturbances add to a step, in the mean of these


def without_sums(times: Sequence[StageTimes]) -> list[StageTimes]:
    """Return the times of stages whose replicas neither sum gradients nor wait for each other."""
    return [replace(one, reduce_s=0.0, gradient_bytes=0, jitter=0.0) for one in times]


def average_plan(
    plan: Plan,
    times: Sequence[StageTimes],
    cluster: Cluster,
    worker_step_s: float,
    *,
    tau: int,
    overlap: bool,
    seed: int = 0,
    disturbances: tuple[Disturbance, ...] = (),
) -> AveragingFigures:
    """Return the costs of averaging steps that take one worker `worker_step_s`.

    The `rank` of each of the `disturbances` is a worker; see `worker_disturbances`.
    """
    name = _simulated(plan.averaging, overlap)
    update_s = min(worker_step_s, max(one.update_s for one in times))
    if not METHODS[name].is_elastic:
        update_s = 0.0  # the update is what is pushed: it counts as a part of the pass
    pass_s, deviation = worker_step_s - update_s, max(one.jitter for one in times)
    link, size = _link(plan, times, cluster)
    costs = AveragingCosts(
        pass_s=jittered(pass_s, deviation, seed) if deviation else pass_s,
        update_s=update_s,
        host_link=link,
        device_link=link,
        tensor_bytes=(size,),
        reduction=RING,
    )
    steps = _NUM_ROUNDS * tau

    def simulated(costs: AveragingCosts) -> AveragingSimulation:
        return simulate_averaging(
            name,
            costs,
            num_workers=plan.data,
            num_batches=plan.data * steps,
            tau=tau,
            is_packed=True,
            overlaps=_overlaps(plan.averaging, overlap),
        )

    done = simulated(costs)
    disturbed = simulated(replace(costs, disturbances=disturbances)) if disturbances else done
    _check_reached(disturbances, disturbed.total_s, steps)
    later_s = (disturbed.total_s - done.total_s) / steps
    added_s = max(0.0, done.total_s / steps - worker_step_s)
    exchange_s = 2 * link.of(size) if plan.drifts else costs.reduction_s(plan.data, link, True)
    writes = sum(disturbed.staleness.values())
    missed = sum(n * k for n, k in disturbed.staleness.items())
    return AveragingFigures(
        method=plan.averaging,
        num_workers=plan.data,
        servers=plan.servers,
        tau=tau,
        exchange_bytes=size * max(1, plan.servers),
        worker_step_s=worker_step_s,
        step_s=worker_step_s + added_s + later_s,
        exchange_s=exchange_s,
        exposed_s=added_s * tau,
        exposed_share=added_s / (worker_step_s + added_s) if added_s else 0.0,
        mean_staleness=missed / writes if writes else 0.0,
        num_steps=steps,
        disturbed_s=later_s,
    )


def worker_disturbances(
    disturbances: Sequence[Disturbance],
    pipe: int,
    step_s: Callable[[int, tuple[Disturbance, ...]], float],
) -> tuple[Disturbance, ...]:
    """Return disturbances of workers, with `pipe` ranks each, for disturbances of ranks.

    A rank that pauses stops its whole pipeline. A slow one delays it by less than its own factor,
    found from `step_s(worker, disturbances)`: the step of a worker alone.
    """
    found = []
    for one in disturbances:
        worker, speed = one.rank // pipe, 0.0
        if one.speed > 0:
            always = replace(one, start_s=0.0, end_s=math.inf)
            speed = step_s(worker, ()) / step_s(worker, (always,))
        found.append(replace(one, rank=worker, speed=speed))
    return tuple(found)


def _check_reached(disturbances: Sequence[Disturbance], end_s: float, num_steps: int) -> None:
    """Raise ConfigError for a disturbance after the simulated time: it would have no effect."""
    for one in disturbances:
        if one.start_s >= end_s:
            raise ConfigError(
                f"a disturbance that begins at {one.start_s:g} s comes after the {num_steps} steps "
                f"that are simulated, which end at {end_s:g} s: let it begin earlier"
            )


def _simulated(method: str, overlap: bool) -> str:
    """Return the simulated method that has the exchanges of a run's method."""
    if method == SYNC_EASGD:
        return "sync_easgd_3" if overlap else "sync_easgd_2"
    if method == ORIGINAL_EASGD:
        return "async_easgd"
    named = {ASYNC_MSGD, HOGWILD_EASGD, HOGWILD_SGD, "async_easgd", "async_measgd", "async_sgd"}
    return method if method in named else "sync_easgd_2"  # an outer optimizer, after the step


def _overlaps(method: str, overlap: bool) -> bool | None:
    """Return False where no pass can hide an exchange, else None: the method's default."""
    # Without a lock, memory is read and written between backward and step.
    return None if overlap and method != HOGWILD_EASGD else False


def _link(plan: Plan, times: Sequence[StageTimes], cluster: Cluster) -> tuple[MessagePrice, int]:
    """Return the price of an exchange and the bytes it moves over it."""
    mesh = plan.mesh()
    held = [times[mesh.coordinates(rank).pipe].gradient_bytes for rank in range(mesh.num_ranks)]
    if not plan.drifts:
        # Columns of ranks exchange at the same time: the slowest counts.
        firsts = [rank for rank in range(mesh.num_ranks) if mesh.coordinates(rank).data == 0]
        rings = {rank: ring_of(mesh, "data", cluster, rank) for rank in firsts}
        rank = max(rings, key=lambda r: held[r] / rings[r].bytes_per_s + rings[r].latency_s)
        ring = rings[rank]
        return MessagePrice(ring.latency_s, 1.0 / ring.bytes_per_s), held[rank]
    worker = [rank for rank in range(mesh.num_ranks) if mesh.coordinates(rank).data == 0]
    servers = range(mesh.num_ranks, plan.num_ranks) if plan.servers else worker[:1]
    others = [rank for rank in range(mesh.num_ranks) if mesh.coordinates(rank).data > 0] or worker
    pairs = [(rank, server) for rank in others for server in servers if rank != server]
    links = [link_between(cluster, rank, server) for rank, server in pairs]
    if not links:
        return MessagePrice(), 0  # a worker alone keeps its centre itself
    slowest = min(links, key=lambda link: link.bytes_per_s)
    size = sum(held[rank] for rank in worker) // max(1, plan.servers)  # of one server
    return MessagePrice(slowest.latency_s, 1.0 / slowest.bytes_per_s), size
