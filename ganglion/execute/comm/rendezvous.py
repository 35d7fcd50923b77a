"""How ranks meet: one process group for the world, then one per group of axes, on demand."""

from __future__ import annotations

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ganglion.decide.topology import Launch, Mesh
from ganglion.errors import ConfigError, LaunchError, LayoutError
from ganglion.execute.comm.choice import AUTO, MPI
from ganglion.execute.comm.collectives import SoloGroup
from ganglion.execute.comm.hosts import this_host
from ganglion.execute.comm.meeting import Meeting
from ganglion.execute.comm.world import World


def open_world(
    launch: Launch,
    mesh: Mesh,
    *,
    timeout_s: float = 300.0,
    transport: str = AUTO,
    meets_alone: bool = False,
) -> World:
    """Meet the other ranks and return the world of `mesh`.

    One process needs no meeting, unless others `open_store` where it `meets_alone`.
    """
    if launch.num_ranks != mesh.num_ranks:
        raise LayoutError(
            f"the plan needs {mesh.num_ranks} processes, but {launch.num_ranks} were started "
            f"(by {launch.launcher}): start {mesh.num_ranks}, for example with torchrun "
            f"--nproc-per-node {mesh.num_ranks}"
        )
    if launch.launcher == "mpiexec":
        from ganglion.execute.comm.mpi import MpiMeeting

        # It opens torch.distributed, too. Whoever meets alone has others beside the world.
        meeting = MpiMeeting(timeout_s, launch.num_ranks if meets_alone else None)
        if transport in (AUTO, MPI):
            return meeting.world(mesh)
    elif transport == MPI and launch.num_ranks > 1:
        raise ConfigError(
            f'parallel.transport = "mpi", but {launch.launcher} started this process: start it '
            f'with mpiexec, or set parallel.transport = "auto"'
        )
    if launch.num_ranks == 1 and not meets_alone and not dist.is_initialized():
        return World(0, mesh, lambda axes: SoloGroup(0))
    if not dist.is_initialized():
        _meet(launch, timeout_s)
    return torch_world(launch.rank, mesh, timeout_s, transport=transport)


def open_store(launch: Launch, timeout_s: float) -> Store:
    """Return the store at which the processes of `launch` meet, also for those outside the world.

    Whoever is first in the world must have met, or a launcher must keep the store.
    """
    try:
        store = TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError, ValueError) as error:
        raise _unmet(launch, error) from error
    return PrefixStore(f"ganglion/attempt {launch.attempt}", store)


def torch_world(
    rank: int, mesh: Mesh, timeout_s: float, *, transport: str = AUTO, host: str | None = None
) -> World:
    """Return a world over the process group that torch.distributed already has.

    `host` tells where this rank runs, if not where it seems to.
    """
    meeting = Meeting(rank, mesh, timeout_s, transport, this_host() if host is None else host)
    return World(rank, mesh, meeting.group, meeting.transport, way=meeting.way)


def _meet(launch: Launch, timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{launch.master_addr}:{launch.master_port}",
            rank=launch.rank,
            world_size=launch.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        # One meeting a process: a second one at the same store would wait for ever, and a group
        # that a user's script made is the user's to destroy.
        atexit.register(_leave)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError, ValueError) as error:
        raise _unmet(launch, error) from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _unmet(launch: Launch, error: Exception) -> LaunchError:
    place = f"{launch.master_addr}:{launch.master_port}"
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return LaunchError(
            f"port {launch.master_port} is in use on {launch.master_addr}: set MASTER_PORT to a "
            f"free port"
        )
    return LaunchError(
        f"rank {launch.rank} of {launch.num_ranks} could not meet the others at {place}: check "
        f"that all ranks were started and MASTER_ADDR can be reached ({error})"
    )
