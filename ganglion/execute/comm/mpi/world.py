"""Opening the world under mpiexec: MPI makes a communicator for each group and transport.

mpi4py is imported only here, on demand: everything else works without it.

    factory = MpiGroupFactory(timeout_s)  # all processes of mpiexec, or the first of them
    world = factory.world(mesh)           # their groups and transports

Processes that serve are in no group: `meeting_point` gives all the address of a store.
"""

from __future__ import annotations

import atexit
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ganglion.decide.topology import AXES, Launch, Mesh
from ganglion.errors import LaunchError, LayoutError
from ganglion.execute.comm.collectives import Group, SoloGroup
from ganglion.execute.comm.hosts import MPI as MPI_CARRIER
from ganglion.execute.comm.mpi.progress import Activity, Pauses, Progress
from ganglion.execute.comm.torch import init_process_group
from ganglion.execute.comm.transport import Transport, timeout_error
from ganglion.execute.comm.world import World
from ganglion.trace import Recorder

if TYPE_CHECKING:
    from mpi4py import MPI

_TCPStore = dist.TCPStore  # type: ignore[attr-defined]  # exported, but not in its types
_ROLL_TAG, _FIRST_TAG, _STORE_TAG, _GROUP_TAG, _TRANSPORT_TAG = 3, 4, 5, 32, 64
_ADDRESS_BYTES = 512
_SETTLE_S = 0.3  # after an abort, mpiexec discards output that it has not read yet


def open_mpi_world(mesh: Mesh, timeout_s: float = 300.0) -> World:
    """Meet the other processes of mpiexec and return the world of `mesh`."""
    return MpiGroupFactory(timeout_s).world(mesh)


def mpi_launch() -> Launch:
    """Return the launch of this process as MPI knows it."""
    world = load_mpi().COMM_WORLD
    host = world.Split_type(load_mpi().COMM_TYPE_SHARED)
    try:
        return Launch(
            rank=world.Get_rank(),
            num_ranks=world.Get_size(),
            local_rank=host.Get_rank(),
            local_num_ranks=host.Get_size(),
            launcher="mpiexec",
        )
    finally:
        host.Free()


@contextmanager
def meeting_point(launch: Launch, timeout_s: float) -> Iterator[Launch]:
    """Yield `launch` with the address of a store, which rank 0 keeps while it is inside.

    All processes of mpiexec must enter.
    """
    mpi = load_mpi()
    everyone = mpi.COMM_WORLD
    call_roll(everyone, range(everyone.Get_size()), _STORE_TAG, timeout_s)
    store = _open_store(mpi, everyone, timeout_s)
    try:
        yield replace(launch, master_addr=store.host, master_port=store.port)
    finally:
        del store


def load_mpi() -> Any:
    """Import and return mpi4py's MPI, initialized; raise LaunchError if that fails."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"MPI cannot be loaded ({error}): install it with pip install 'ganglion[mpi]'"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "this MPI library does not let several threads call it (MPI_THREAD_MULTIPLE): use the "
            "one of pip install 'ganglion[mpi]'"
        )
    return MPI


class MpiGroupFactory:
    """Makes the groups and transports of one process of mpiexec."""

    def __init__(self, timeout_s: float, num_ranks: int | None = None) -> None:
        """Meet all processes, or the first `num_ranks`, which alone call this then.

        Raise PeerLost that names those that do not call in time.
        """
        self._mpi = load_mpi()
        everyone = self._mpi.COMM_WORLD
        self.rank: int = everyone.Get_rank()
        self.num_ranks: int = min(everyone.Get_size(), num_ranks or everyone.Get_size())
        self._timeout_s = timeout_s
        self._progress = Progress()
        ranks = tuple(range(self.num_ranks))
        call_roll(everyone, ranks, _ROLL_TAG, timeout_s)
        whole = len(ranks) == everyone.Get_size()
        self._comm: MPI.Intracomm = (
            everyone.Dup() if whole else _create_comm(everyone, ranks, _FIRST_TAG)
        )
        _open_torch(self._mpi, self._comm, timeout_s)
        if self.num_ranks > 1:  # after torch, whose hook prints only when ours has returned
            sys.excepthook = _AbortHook(self._mpi)
        # MPI ends after this, when no thread may be inside one of its calls.
        atexit.register(self._progress.stop)

    def world(self, mesh: Mesh) -> World:
        """Return the world of `mesh` over MPI."""
        if mesh.num_ranks != self.num_ranks:
            raise LayoutError(
                f"the plan needs {mesh.num_ranks} processes, but MPI sees {self.num_ranks}: start "
                f"mpiexec -n {mesh.num_ranks}, with the mpiexec of the MPI library that mpi4py "
                f"loads ({self._mpi.Get_library_version().splitlines()[0].strip()})"
            )
        return World(
            self.rank,
            mesh,
            lambda axes: self._group(mesh, axes),
            lambda axes, trace: self._transport(mesh, axes, trace),
            carrier=MPI_CARRIER,
        )

    def _group(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        from ganglion.execute.comm.mpi.group import MpiGroup

        ranks = mesh.group_of(self.rank, axes)
        if len(ranks) == 1:
            return SoloGroup(self.rank)
        comm = self._new_comm(ranks, _GROUP_TAG + _number(axes))
        return MpiGroup(ranks, self.rank, comm, self._progress, self._timeout_s)

    def _transport(self, mesh: Mesh, axes: tuple[str, ...], trace: Recorder | None) -> Transport:
        from ganglion.execute.comm.mpi.transport import MpiTransport

        ranks = mesh.group_of(self.rank, axes)
        comm = self._new_comm(ranks, _TRANSPORT_TAG + _number(axes))
        return MpiTransport(ranks, self.rank, comm, self._progress, trace)

    def _new_comm(self, ranks: tuple[int, ...], tag: int) -> MPI.Intracomm:
        """Return a communicator of `ranks`, which call this together."""
        call_roll(self._comm, ranks, tag, self._timeout_s)  # MPI itself would wait for ever
        return _create_comm(self._comm, ranks, tag)


def _create_comm(comm: MPI.Intracomm, ranks: tuple[int, ...], tag: int) -> MPI.Intracomm:
    """Return a communicator of `ranks`, positions in `comm`, which have met."""
    whole = comm.Get_group()
    part = whole.Incl(ranks)
    try:
        return comm.Create_group(part, tag)
    finally:
        part.Free()
        whole.Free()


def _number(axes: tuple[str, ...]) -> int:
    """Return a tag for each set of axes: ranks that ask for different ones must not meet."""
    return sum(1 << AXES.index(axis) for axis in axes)


def call_roll(comm: MPI.Intracomm, ranks: Sequence[int], tag: int, timeout_s: float) -> None:
    """Return when all of `ranks` have called this; raise PeerLost that names those that did not."""
    mine = comm.Get_rank()
    others = [rank for rank in ranks if rank != mine]
    sends = [comm.Isend(b"", rank, tag) for rank in others]
    receives = {rank: comm.Irecv(bytearray(0), rank, tag) for rank in others}
    end_s = time.monotonic() + timeout_s
    pauses = Pauses({Activity.AWAITING: 1e-3}, longest_s=1e-3)
    while late := [rank for rank, request in receives.items() if not request.Test()]:
        if time.monotonic() > end_s:
            raise timeout_error(mine, late, timeout_s, f"ranks {list(ranks)} to meet")
        pauses.pause(Activity.AWAITING)
    for send in sends:
        send.Wait()


class _AbortHook:
    """Ends all ranks after an uncaught exception; otherwise MPI would wait for them at exit."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._before = sys.excepthook

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self._before(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_SETTLE_S)
        self._mpi.COMM_WORLD.Abort(1)


def _open_torch(mpi: Any, comm: MPI.Intracomm, timeout_s: float) -> None:
    """Initialize torch.distributed, which checkpoints need."""
    if dist.is_initialized():
        return
    rank, size = comm.Get_rank(), comm.Get_size()
    try:
        store = _open_store(mpi, comm, timeout_s)
        init_process_group(rank, size, timeout_s, store=store)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {rank} of {size} could not open torch.distributed, which checkpoints need, "
            f"beside MPI: check that the hosts can reach each other by name ({error})"
        ) from error


def _open_store(mpi: Any, comm: MPI.Intracomm, timeout_s: float) -> Any:
    """Return the store that the first of `comm` opens for all of it."""
    size, timeout = comm.Get_size(), timedelta(seconds=timeout_s)
    address, host, store = bytearray(_ADDRESS_BYTES), _own_address(mpi, comm), None
    if comm.Get_rank() == 0:
        store = _TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
        place = f"{host} {store.port}".encode()
        address[: len(place)] = place
    comm.Bcast([address, mpi.BYTE], 0)
    host, port = address.rstrip(b"\0").decode().split()
    return store or _TCPStore(host, int(port), size, False, timeout)


def _own_address(mpi: Any, comm: MPI.Intracomm) -> str:
    """Return a name by which other ranks can reach this host."""
    host = comm.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        return "localhost" if host.Get_size() == comm.Get_size() else socket.gethostname()
    finally:
        host.Free()
