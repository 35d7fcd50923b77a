"""Opening the world: ranks meet over torch.distributed, then make groups and transports on demand.

Every rank takes part in making every group, in one order: torch requires it, and addresses of
Unix sockets are gathered over all ranks. A group along some axes is made of

    ranks on one host         shared memory
    ranks on several hosts    shared memory inside each, torch.distributed between the first of each
"""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ganglion.decide.topology import Launch, Mesh
from ganglion.errors import CommError, ConfigError, LaunchError, LayoutError, PeerLost
from ganglion.execute.comm.collectives import MAX, Group, SoloGroup
from ganglion.execute.comm.hosts import AUTO, MPI, SHM, HostMap, choose_transport, this_host
from ganglion.execute.comm.shm import ShmGroup, connect_mesh, open_shm_transport
from ganglion.execute.comm.spanning import SpanningGroup
from ganglion.execute.comm.torch import TorchTransport, WorldGroup, init_process_group, new_group
from ganglion.execute.comm.transport import Transport
from ganglion.execute.comm.world import World
from ganglion.trace import Recorder

_TEXT_BYTES = 256


def open_world(
    launch: Launch,
    mesh: Mesh,
    *,
    timeout_s: float = 300.0,
    transport: str = AUTO,
    meets_alone: bool = False,
) -> World:
    """Meet the other ranks and return the world of `mesh`.

    A single process opens no store, unless `meets_alone`, which lets others `open_store`.
    """
    if launch.num_ranks != mesh.num_ranks:
        raise LayoutError(
            f"the plan needs {mesh.num_ranks} processes, but {launch.num_ranks} were started "
            f"(by {launch.launcher}): start {mesh.num_ranks}, for example with torchrun "
            f"--nproc-per-node {mesh.num_ranks}"
        )
    if launch.launcher == "mpiexec":
        from ganglion.execute.comm.mpi import MpiGroupFactory

        # It opens torch.distributed, too. With `meets_alone` there are processes beside the world.
        factory = MpiGroupFactory(timeout_s, launch.num_ranks if meets_alone else None)
        if transport in (AUTO, MPI):
            return factory.world(mesh)
    elif transport == MPI and launch.num_ranks > 1:
        raise ConfigError(
            f'parallel.transport = "mpi", but {launch.launcher} started this process: start it '
            f'with mpiexec, or set parallel.transport = "auto"'
        )
    if not dist.is_initialized():
        if launch.num_ranks == 1 and not meets_alone:
            return World(0, mesh, lambda axes: SoloGroup(0))
        address = f"tcp://{launch.master_addr}:{launch.master_port}"
        try:
            init_process_group(launch.rank, launch.num_ranks, timeout_s, init_method=address)
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError, ValueError) as error:
            raise _launch_error(launch, error) from error
    return torch_world(launch.rank, mesh, timeout_s, transport=transport)


def open_store(launch: Launch, timeout_s: float) -> Store:
    """Return the store of the processes of `launch`, also for those outside the world.

    The first rank of the world must have met, or a launcher must keep the store.
    """
    try:
        store = TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError, ValueError) as error:
        raise _launch_error(launch, error) from error
    return PrefixStore(f"ganglion/attempt {launch.attempt}", store)


def torch_world(
    rank: int, mesh: Mesh, timeout_s: float, *, transport: str = AUTO, host: str | None = None
) -> World:
    """Return a world over the process group that torch.distributed already has.

    `host` overrides the name of the host that this rank runs on.
    """
    host = this_host() if host is None else host
    factory = GroupFactory(rank, mesh, timeout_s, transport, host)
    return World(rank, mesh, factory.group, factory.transport, carrier=factory.carrier)


class GroupFactory:
    """Makes the groups and transports of one rank of a mesh."""

    def __init__(self, rank: int, mesh: Mesh, timeout_s: float, transport: str, host: str) -> None:
        """Gather the hosts of all ranks, which must call this together; `rank` is on `host`."""
        self._rank = rank
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._everyone = tuple(range(mesh.num_ranks))
        self._hosts = HostMap(tuple(self._gather_texts(host)))
        self.carrier = choose_transport(transport, self._hosts, has_gpu=torch.cuda.is_available())

    def group(self, axes: tuple[str, ...]) -> Group:
        """Return this rank's group along `axes`; every rank must call this with the same."""
        if self._mesh.group_of(self._rank, axes) == (self._rank,):
            return SoloGroup(self._rank)
        group = self._shared_group(axes) if self.carrier == SHM else None
        return self._torch_group(axes) if group is None else group

    def transport(self, axes: tuple[str, ...], trace: Recorder | None) -> Transport:
        """Return a transport between the ranks of this rank's group; every rank must call this."""
        groups = self._mesh.groups(axes)
        mine = self._mesh.group_of(self._rank, axes)
        if self.carrier == SHM and all(len(self._hosts.parts(group)) == 1 for group in groups):
            return open_shm_transport(self._rank, mine, self._gather_texts, self._timeout_s, trace)
        pairs = [(a, b) for group in groups for a in group for b in group if a < b]
        return TorchTransport(self._rank, pairs, self._timeout_s, trace)

    @property
    def _world(self) -> WorldGroup:
        # Made anew each time: an object that holds the process group keeps its threads alive past
        # its destruction, into the end of the interpreter, where they may abort the process.
        return WorldGroup(self._everyone, self._rank)

    def _gather_texts(self, text: str) -> list[str]:
        """Return the short texts of all ranks; every rank must call this."""
        data = text.encode()
        assert len(data) < _TEXT_BYTES, "gathered texts are short"
        mine = torch.frombuffer(bytearray(data.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
        table = torch.empty(len(self._everyone) * _TEXT_BYTES, dtype=torch.uint8)
        self._world.all_gather(table, mine).wait()
        rows = table.view(-1, _TEXT_BYTES).tolist()
        return [bytes(row).rstrip(b"\0").decode() for row in rows]

    def _torch_group(self, axes: tuple[str, ...]) -> Group:
        groups = self._mesh.groups(axes)
        if len(groups) == 1 and len(groups[0]) == len(self._everyone):
            return self._world
        made = [new_group(ranks, self._rank, self._timeout_s) for ranks in groups]
        return next(group for group in made if group is not None)

    def _shared_group(self, axes: tuple[str, ...]) -> Group | None:
        """Return a group that shares memory inside hosts, or None if a rank got no memory."""
        parts = {group: self._hosts.parts(group) for group in self._mesh.groups(axes)}
        if all(len(part) == 1 for group in parts.values() for part in group):
            return None  # one rank a host everywhere
        mine = parts[self._mesh.group_of(self._rank, axes)]
        inside = self._inside_host(next(part for part in mine if self._rank in part))
        between = self._between_hosts(list(parts.values()))
        failures = torch.tensor([0 if inside is not None else 1])
        self._world.all_reduce(failures, MAX).wait()
        if int(failures):
            for group in (inside, between):
                if group is not None:
                    group.close()
            return None
        assert inside is not None
        return inside if len(mine) == 1 else SpanningGroup(self._rank, mine, inside, between)

    def _inside_host(self, ranks: tuple[int, ...]) -> Group | None:
        """Return the group of the ranks on this host, or None if there is no memory for it."""
        if len(ranks) == 1:
            for _ in range(2):
                self._gather_texts("")  # the other ranks connect now
            return SoloGroup(self._rank)

        def gather_given(text: str) -> list[str]:
            return [other for other in self._gather_texts(text) if other]

        small, large = (
            connect_mesh(self._rank, ranks, gather_given, self._timeout_s) for _ in range(2)
        )
        try:
            return ShmGroup(ranks, self._rank, small, large, self._timeout_s)
        except PeerLost:
            raise
        except CommError as error:
            warnings.warn(
                f"ranks {list(ranks)} talk over torch.distributed, for there is no shared memory "
                f"for them: {error}",
                stacklevel=2,
            )
            return None

    def _between_hosts(self, all_parts: list[list[tuple[int, ...]]]) -> Group | None:
        """Make the groups of the first ranks of every host; return this rank's, if it has one."""
        firsts = [tuple(part[0] for part in parts) for parts in all_parts if len(parts) > 1]
        made = [new_group(tuple(sorted(ranks)), self._rank, self._timeout_s) for ranks in firsts]
        return next((group for group in made if group is not None), None)


def _launch_error(launch: Launch, error: Exception) -> LaunchError:
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return LaunchError(
            f"port {launch.master_port} is in use on {launch.master_addr}: set MASTER_PORT to a "
            f"free port"
        )
    return LaunchError(
        f"rank {launch.rank} of {launch.num_ranks} could not meet the others at "
        f"{launch.master_addr}:{launch.master_port}: check that all ranks were started and "
        f"MASTER_ADDR can be reached ({error})"
    )
