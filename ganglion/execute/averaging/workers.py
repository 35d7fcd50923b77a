"""The groups of workers, each of which may be several processes.

With `inner` = 2 and four processes, ranks 0, 1 are worker 0, and ranks 2, 3 are worker 1:

    inside    [0 1] [2 3]       axis x of the mesh: neighbours
    between   [0 2] [1 3]       axis data

Server processes come last and are in none of these groups.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ganglion.decide.topology import Launch, Mesh, read_launch
from ganglion.errors import ConfigError, LayoutError
from ganglion.execute.averaging.methods import TreeGroup
from ganglion.execute.comm import Group, World, open_world

_USE = "averaging"


@dataclass(frozen=True, slots=True)
class Workers:
    """The world and groups of this process; `is_owner` if the world was opened here."""

    world: World
    everyone: Group
    inside: Group
    between: Group
    is_owner: bool

    @property
    def index(self) -> int:
        """The number of this process in checkpoints: its rank."""
        return self.world.rank

    @property
    def number(self) -> int:
        """The number of processes."""
        return self.world.num_ranks

    def close(self) -> None:
        """Close the groups and the world that were opened here."""
        if isinstance(self.between, TreeGroup):
            self.between.close()
        if self.is_owner:
            self.world.close()


def find_workers(
    world: World | None,
    environment: Mapping[str, str],
    inner: int,
    deterministic: bool,
    timeout_s: float,
    servers: int = 0,
) -> Workers:
    """Return the workers of `world`, or of the launch without its last `servers` processes."""
    met = _open(environment, inner, timeout_s, servers) if world is None else world
    if met.mesh.x != inner:
        raise LayoutError(
            f"inner = {inner} processes a worker, but the world has x = {met.mesh.x}: make it with "
            f"Mesh(data=..., x={inner})"
        )
    between = met.group("data", use=_USE)
    if deterministic and between.size > 1:
        between = TreeGroup(lambda: met.open_transport("data"), between.ranks, timeout_s)
    return Workers(met, met.everyone(), met.group("x", use=_USE), between, world is None)


def server_place(launch: Launch, servers: int) -> int | None:
    """Return the number of a server process; None if the process is a worker."""
    num_workers = launch.num_ranks - servers
    if num_workers < 1:
        raise LayoutError(
            f"servers = {servers} of the {launch.num_ranks} processes that were started leave no "
            f"worker: start {servers} more than you want workers"
        )
    if launch.launcher == "mpiexec" and not launch.master_port:
        raise ConfigError(
            f"servers = {servers} need a store to meet at, which mpiexec does not give: start the "
            f"processes with torchrun or srun, train a run file with `ganglion train`, which opens "
            f"one, or leave servers out"
        )
    return launch.rank - num_workers if launch.rank >= num_workers else None


def own_address(launch: Launch) -> str | None:
    """Return an address at which other hosts reach this process; None if all are on one host.

    It is the address of this host towards the master.
    """
    if launch.local_num_ranks >= launch.num_ranks:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launch.master_addr, launch.master_port or 1))  # sends nothing
        return str(probe.getsockname()[0])


def _open(environment: Mapping[str, str], inner: int, timeout_s: float, servers: int) -> World:
    launch = read_launch(environment)
    num_ranks = launch.num_ranks - servers
    if inner < 1 or num_ranks % inner:
        raise LayoutError(
            f"inner = {inner} does not divide the {num_ranks} processes that were started: "
            f"start a multiple of {max(1, inner)}"
        )
    mesh = Mesh(data=num_ranks // inner, x=inner)
    among = dataclasses.replace(launch, num_ranks=num_ranks)
    return open_world(among, mesh, timeout_s=timeout_s, meets_alone=servers > 0)
