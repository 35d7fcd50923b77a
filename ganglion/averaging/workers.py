"""Who the other workers are: groups of a world in which every few processes are one worker.

With `inner` = 2 and four processes, ranks 0, 1 are worker 0, and ranks 2, 3 are worker 1:

    inside    [0 1] [2 3]       axis x of the mesh: neighbours
    between   [0 2] [1 3]       axis data
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ganglion.averaging.tree import TreeGroup
from ganglion.comm import Group, World, open_world
from ganglion.errors import LayoutError
from ganglion.topology import Mesh, read_launch

_USE = "averaging"


@dataclass(frozen=True, slots=True)
class Workers:
    """The groups this process belongs to, and its place among the workers."""

    world: World
    everyone: Group
    inside: Group
    between: Group
    is_owner: bool

    @property
    def index(self) -> int:
        """This process's place in checkpoints: its rank."""
        return self.world.rank

    @property
    def number(self) -> int:
        """How many processes there are."""
        return self.world.num_ranks

    def close(self) -> None:
        """Close what was opened here."""
        if isinstance(self.between, TreeGroup):
            self.between.close()
        if self.is_owner:
            self.world.close()


def meet(
    world: World | None,
    environment: Mapping[str, str],
    inner: int,
    deterministic: bool,
    timeout_s: float,
) -> Workers:
    """Return the workers of `world`, or of those that the launcher started with this one."""
    met = _open(environment, inner, timeout_s) if world is None else world
    if met.mesh.x != inner:
        raise LayoutError(
            f"inner = {inner} processes a worker, but the world has x = {met.mesh.x}: make it with "
            f"Mesh(data=..., x={inner})"
        )
    between = met.group("data", use=_USE)
    if deterministic and between.size > 1:
        between = TreeGroup(lambda: met.open_transport("data"), between.ranks, timeout_s)
    return Workers(met, met.everyone(), met.group("x", use=_USE), between, world is None)


def _open(environment: Mapping[str, str], inner: int, timeout_s: float) -> World:
    launch = read_launch(environment)
    if inner < 1 or launch.num_ranks % inner:
        raise LayoutError(
            f"inner = {inner} does not divide the {launch.num_ranks} processes that were started: "
            f"start a multiple of {max(1, inner)}"
        )
    mesh = Mesh(data=launch.num_ranks // inner, x=inner)
    return open_world(launch, mesh, timeout_s=timeout_s)
