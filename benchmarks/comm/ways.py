"""The contestants of the communication benchmark, each behind the same few calls.

shm, torch, mpi     Ganglion, over shared memory, torch.distributed and MPI
gloo, mpich         the peers: torch.distributed and mpi4py, called directly
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ganglion.decide.topology import Mesh
from ganglion.execute.comm import Group, Transport, World, torch_world

TIMEOUT_S = 60.0
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
# Newer versions of torch have other names for these two.
_gloo_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_gloo_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Wire(Protocol):
    """Messages of one size between two ranks, in memory that was made before."""

    def send(self) -> None: ...

    def receive(self) -> Tensor: ...

    def exchange(self, work: Callable[[], None]) -> Tensor:
        """Send one message and receive one, with `work` in between."""


class Way(Protocol):
    """One contestant, as one of its ranks sees it."""

    rank: int
    num_ranks: int

    def barrier(self) -> None: ...

    def wire(self, num_bytes: int) -> Wire: ...

    def allocate(self, num_elements: int) -> Tensor: ...

    def collective(self, verb: str, output: Tensor, tensor: Tensor) -> Callable[[], None]:
        """Return what one call does; `output` of an all-reduce is its `tensor`."""

    def close(self) -> None: ...


class OurWire:
    """Ganglion's messages, whatever carries them."""

    def __init__(self, transport: Transport, num_bytes: int) -> None:
        self._transport = transport
        (self._peer,) = transport.peers
        self._tensor = _filled(num_bytes, transport.rank)

    def send(self) -> None:
        self._transport.post(self._peer, "forward", self._tensor)

    def receive(self) -> Tensor:
        return self._transport.receive(TIMEOUT_S, "a message").tensor

    def exchange(self, work: Callable[[], None]) -> Tensor:
        self.send()
        work()
        return self.receive()


class OurWay:
    """Ganglion's groups and transports of one world."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.num_ranks = world.num_ranks
        self._world = world
        self._allocated: dict[int, Tensor] = {}
        self._group: Group = world.group("data")
        self._transport = world.open_transport("data") if world.num_ranks == 2 else None

    def barrier(self) -> None:
        self._group.barrier()

    def wire(self, num_bytes: int) -> Wire:
        assert self._transport is not None
        return OurWire(self._transport, num_bytes)

    def allocate(self, num_elements: int) -> Tensor:
        """Return the same memory again: the group would keep all that it ever gave."""
        if num_elements not in self._allocated:
            self._allocated[num_elements] = self._group.allocate(num_elements, torch.float32)
        return self._allocated[num_elements]

    def collective(self, verb: str, output: Tensor, tensor: Tensor) -> Callable[[], None]:
        group = self._group
        calls: dict[str, Callable[[], None]] = {
            ALL_REDUCE: lambda: group.all_reduce(tensor).wait(),
            ALL_GATHER: lambda: group.all_gather(output, tensor).wait(),
            REDUCE_SCATTER: lambda: group.reduce_scatter(output, tensor).wait(),
        }
        return calls[verb]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._world.close()


class GlooWire:
    """torch.distributed's own messages between two preallocated tensors."""

    def __init__(self, rank: int, num_bytes: int) -> None:
        self._peer = 1 - rank
        self._tensor = _filled(num_bytes, rank)
        self._room = torch.zeros_like(self._tensor)

    def send(self) -> None:
        dist.send(self._tensor, self._peer)

    def receive(self) -> Tensor:
        dist.recv(self._room, self._peer)
        return self._room

    def exchange(self, work: Callable[[], None]) -> Tensor:
        requests = [dist.isend(self._tensor, self._peer), dist.irecv(self._room, self._peer)]
        work()
        for request in requests:
            assert request is not None
            request.wait()
        return self._room


class GlooWay:
    """torch.distributed as everybody uses it."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    def barrier(self) -> None:
        dist.barrier()

    def wire(self, num_bytes: int) -> Wire:
        return GlooWire(self.rank, num_bytes)

    def allocate(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements)

    def collective(self, verb: str, output: Tensor, tensor: Tensor) -> Callable[[], None]:
        calls: dict[str, Callable[[], Any]] = {
            ALL_REDUCE: lambda: dist.all_reduce(tensor),
            ALL_GATHER: lambda: _gloo_all_gather(output, tensor),
            REDUCE_SCATTER: lambda: _gloo_reduce_scatter(output, tensor),
        }
        return calls[verb]

    def close(self) -> None:
        dist.destroy_process_group()


class MpichWire:
    """mpi4py's messages between two numpy arrays."""

    def __init__(self, mpi: Any, rank: int, num_bytes: int) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD
        self._peer = 1 - rank
        self._array = _filled(num_bytes, rank).numpy()
        self._room = torch.zeros(num_bytes // 4)
        self._room_array = self._room.numpy()

    def send(self) -> None:
        self._comm.Send(self._array, self._peer)

    def receive(self) -> Tensor:
        self._comm.Recv(self._room_array, self._peer)
        return self._room

    def exchange(self, work: Callable[[], None]) -> Tensor:
        send = self._comm.Isend(self._array, self._peer)
        receive = self._comm.Irecv(self._room_array, self._peer)
        work()
        self._mpi.Request.Waitall([send, receive])
        return self._room


class MpichWay:
    """mpi4py as everybody uses it."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.num_ranks: int = MPI.COMM_WORLD.Get_size()

    def barrier(self) -> None:
        self._mpi.COMM_WORLD.Barrier()

    def wire(self, num_bytes: int) -> Wire:
        return MpichWire(self._mpi, self.rank, num_bytes)

    def allocate(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements)

    def collective(self, verb: str, output: Tensor, tensor: Tensor) -> Callable[[], None]:
        comm, in_place = self._mpi.COMM_WORLD, self._mpi.IN_PLACE
        target, source = output.numpy(), tensor.numpy()
        calls: dict[str, Callable[[], None]] = {
            ALL_REDUCE: lambda: comm.Allreduce(in_place, source),
            ALL_GATHER: lambda: comm.Allgather(source, target),
            REDUCE_SCATTER: lambda: comm.Reduce_scatter_block(source, target),
        }
        return calls[verb]

    def close(self) -> None:
        pass  # mpi4py does it at exit


def open_ways(world: str, arguments: Sequence[str]) -> dict[str, Way]:
    """Meet the other ranks; return the ways that this kind of world has."""
    if world == "mpich":
        return {"mpich": MpichWay()}
    if world == "mpi":
        from mpi4py import MPI

        from ganglion.execute.comm.mpi.world import open_mpi_world

        mesh = Mesh(data=MPI.COMM_WORLD.Get_size())
        return {"mpi": OurWay(open_mpi_world(mesh, TIMEOUT_S))}
    rank, num_ranks, port = map(int, arguments)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    ways: dict[str, Way] = {
        name: OurWay(torch_world(rank, Mesh(data=num_ranks), TIMEOUT_S, transport=name))
        for name in ("shm", "torch")
    }
    return {**ways, "gloo": GlooWay(rank, num_ranks)}


def _filled(num_bytes: int, rank: int) -> Tensor:
    return torch.full((num_bytes // 4,), rank + 1.0)
