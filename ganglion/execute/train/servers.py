"""Server processes of a run: the last ones of a launch, outside the mesh."""

from __future__ import annotations

import dataclasses
import logging

from ganglion.decide.plan import Plan
from ganglion.decide.topology import Launch
from ganglion.execute.averaging import own_address, server_place
from ganglion.execute.averaging.served import CountingStore, ServerProcess
from ganglion.execute.comm import open_store

logger = logging.getLogger(__name__)


def serve_centers(plan: Plan, launch: Launch, timeout_s: float = 300.0) -> bool:
    """Serve until all workers have left, if this process is a server; return whether it was.

    A script calls it before `parallelize`, with the result of `read_launch`.
    """
    if not plan.servers:
        return False
    place = server_place(launch, plan.servers)
    if place is None:
        return False
    seen = ServerProcess(open_store(launch, timeout_s), place, timeout_s).serve(
        listen_on=own_address(launch)
    )
    for number, metrics in enumerate(seen):
        logger.info("served part %d of centre %d: %s", place, number, metrics)
    return True


def workers_of(launch: Launch, plan: Plan) -> Launch:
    """Return the same launch without its servers."""
    return dataclasses.replace(launch, num_ranks=launch.num_ranks - plan.servers)


def store_of(launch: Launch, plan: Plan, timeout_s: float) -> CountingStore | None:
    """Return the store through which workers find the servers of a plan; None without servers."""
    return open_store(launch, timeout_s) if plan.servers else None
