"""How ranks meet under mpiexec: MPI knows who is there, and makes a communicator for each group.

MPI is loaded only here, when somebody asks for it: everything else works without it.

    meeting = MpiMeeting(timeout_s)       # all processes of mpiexec, or the first of them
    world = meeting.world(mesh)           # their groups and transports

Processes that serve are in no group: `meeting_point` tells all where a store is to be found.
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

import torch
import torch.distributed as dist

from ganglion.decide.topology import AXES, Launch, Mesh
from ganglion.errors import LaunchError, LayoutError
from ganglion.execute.comm.choice import MPI as MPI_WAY
from ganglion.execute.comm.collectives import Group, SoloGroup
from ganglion.execute.comm.mpi.progress import Activity, Pauses, Progress
from ganglion.execute.comm.transport import Transport, silence
from ganglion.execute.comm.world import World
from ganglion.trace import Recorder

if TYPE_CHECKING:
    from mpi4py import MPI

_TCPStore = dist.TCPStore  # type: ignore[attr-defined]  # exported, but not in its types
_ROLL_TAG, _FIRST_TAG, _STORE_TAG, _GROUP_TAG, _TRANSPORT_TAG = 3, 4, 5, 32, 64
_ADDRESS_BYTES = 512
_SETTLE_S = 0.3  # after an abort, mpiexec throws away what it has not read yet


def open_mpi_world(mesh: Mesh, timeout_s: float = 300.0) -> World:
    """Meet the other processes of mpiexec and return the world of `mesh`."""
    return MpiMeeting(timeout_s).world(mesh)


def mpi_launch() -> Launch:
    """Return this process's place as MPI itself knows it."""
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
    """Yield `launch` with the address of a store at rank 0; all processes of mpiexec enter.

    The store is there as long as rank 0 is inside.
    """
    mpi = load_mpi()
    everyone = mpi.COMM_WORLD
    call_roll(everyone, range(everyone.Get_size()), _STORE_TAG, timeout_s)
    store = _store_of_all(mpi, everyone, timeout_s)
    try:
        yield replace(launch, master_addr=store.host, master_port=store.port)
    finally:
        del store


def load_mpi() -> Any:
    """Return mpi4py's MPI, initialized; LaunchError if it cannot be had."""
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


class MpiMeeting:
    """All processes that mpiexec started, and what this one needs to talk to the others."""

    def __init__(self, timeout_s: float, num_ranks: int | None = None) -> None:
        """Meet the others, or the first `num_ranks`; PeerLost names those who do not come in time.

        Those beyond have another task and do not call this.
        """
        self._mpi = load_mpi()
        everyone = self._mpi.COMM_WORLD
        self.rank: int = everyone.Get_rank()
        self.num_ranks: int = min(everyone.Get_size(), num_ranks or everyone.Get_size())
        self._timeout_s = timeout_s
        self._progress = Progress()
        ranks = tuple(range(self.num_ranks))
        call_roll(everyone, ranks, _ROLL_TAG, timeout_s)
        self._comm: MPI.Intracomm = _first_of(everyone, ranks)
        _open_torch(self._mpi, self._comm, timeout_s)
        if self.num_ranks > 1:  # after torch, whose own hook prints only when ours has returned
            sys.excepthook = _AbortHook(self._mpi)
        # MPI ends after this: no thread may be inside one of its calls then.
        atexit.register(self._progress.stop)

    def world(self, mesh: Mesh) -> World:
        """Return the world of `mesh`, which talks over MPI."""
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
            way=MPI_WAY,
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
        """Make a communicator once all members are there: MPI would wait for them for ever."""
        call_roll(self._comm, ranks, tag, self._timeout_s)
        whole = self._comm.Get_group()
        part = whole.Incl(ranks)
        try:
            return self._comm.Create_group(part, tag)
        finally:
            part.Free()
            whole.Free()


def _first_of(everyone: MPI.Intracomm, ranks: tuple[int, ...]) -> MPI.Intracomm:
    """Return a communicator of our own among these ranks, who have met."""
    if len(ranks) == everyone.Get_size():
        return everyone.Dup()
    whole = everyone.Get_group()
    part = whole.Incl(ranks)
    try:
        return everyone.Create_group(part, _FIRST_TAG)
    finally:
        part.Free()
        whole.Free()


def _number(axes: tuple[str, ...]) -> int:
    """Return a number of its own for each set of axes: ranks that ask for others never meet."""
    return sum(1 << AXES.index(axis) for axis in axes)


def call_roll(comm: MPI.Intracomm, ranks: Sequence[int], tag: int, timeout_s: float) -> None:
    """Return when every one of `ranks` has called this; PeerLost names those that did not."""
    mine = comm.Get_rank()
    others = [rank for rank in ranks if rank != mine]
    sends = [comm.Isend(b"", rank, tag) for rank in others]
    receives = {rank: comm.Irecv(bytearray(0), rank, tag) for rank in others}
    end_s = time.monotonic() + timeout_s
    pauses = Pauses({Activity.AWAITING: 1e-3}, longest_s=1e-3)
    while late := [rank for rank, request in receives.items() if not request.Test()]:
        if time.monotonic() > end_s:
            raise silence(mine, late, timeout_s, f"ranks {list(ranks)} to meet")
        pauses.pause(Activity.AWAITING)
    for send in sends:
        send.Wait()


class _AbortHook:
    """Ends all ranks after an uncaught exception: at exit, MPI would wait for the others."""

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
    """Give torch.distributed a world of its own, which checkpoints need: rank 0 opens a store."""
    if dist.is_initialized():
        return
    rank, size, timeout = comm.Get_rank(), comm.Get_size(), timedelta(seconds=timeout_s)
    try:
        store = _store_of_all(mpi, comm, timeout_s)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {rank} of {size} could not open torch.distributed, which checkpoints need, "
            f"beside MPI: check that the hosts can reach each other by name ({error})"
        ) from error
    atexit.register(_close_torch)


def _store_of_all(mpi: Any, comm: MPI.Intracomm, timeout_s: float) -> Any:
    """Return a store that the first of `comm` opens, and all of it find."""
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
    """Return the name other ranks can reach this host by."""
    host = comm.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        return "localhost" if host.Get_size() == comm.Get_size() else socket.gethostname()
    finally:
        host.Free()


def _close_torch() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
