"""Making groups and transports among ranks that have met over torch.distributed.

Every rank takes part in making every group, in one order: torch wants it so, and addresses of
Unix sockets travel through the world's own group. A group along some axes is made of

    ranks on one host         shared memory
    ranks on several hosts    shared memory inside each, torch.distributed between the first of each
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ganglion.decide.topology import Mesh
from ganglion.errors import CommError, PeerLost
from ganglion.execute.comm.choice import SHM, choose_way
from ganglion.execute.comm.collectives import MAX, Group, SoloGroup
from ganglion.execute.comm.hosts import HostMap
from ganglion.execute.comm.shm import ShmGroup, connect_mesh, open_shm_transport
from ganglion.execute.comm.spanning import SpanningGroup
from ganglion.execute.comm.torch import TorchTransport, WorldGroup, new_group
from ganglion.execute.comm.transport import Transport
from ganglion.trace import Recorder

_TEXT_BYTES = 256


class Meeting:
    """The ranks of a mesh, and how each of them reaches the others."""

    def __init__(self, rank: int, mesh: Mesh, timeout_s: float, transport: str, host: str) -> None:
        """Meet as `rank`, which runs on `host`; all ranks do so at the same time."""
        self._rank = rank
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._everyone = tuple(range(mesh.num_ranks))
        self.hosts = HostMap(tuple(self.exchange(host)))
        self.way = choose_way(transport, self.hosts, has_gpu=torch.cuda.is_available())

    @property
    def _world(self) -> WorldGroup:
        # Made anew each time: who holds the process group keeps its threads alive past its
        # destruction, into the end of the interpreter, where they may abort the process.
        return WorldGroup(self._everyone, self._rank)

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks; every rank must call this."""
        mine = _packed(text)
        table = torch.empty(len(self._everyone) * _TEXT_BYTES, dtype=torch.uint8)
        self._world.all_gather(table, mine).wait()
        return [_unpacked(row) for row in table.view(-1, _TEXT_BYTES)]

    def group(self, axes: tuple[str, ...]) -> Group:
        """Return this rank's group along some axes; every rank must ask for the same."""
        if self._mesh.group_of(self._rank, axes) == (self._rank,):
            return SoloGroup(self._rank)
        if self.way == SHM:
            group = self._shared_group(axes)
            if group is not None:
                return group
        return self._torch_group([*self._mesh.groups(axes)])

    def transport(self, axes: tuple[str, ...], trace: Recorder | None) -> Transport:
        """Return a transport between the ranks of this rank's group; every rank must ask."""
        groups = self._mesh.groups(axes)
        mine = self._mesh.group_of(self._rank, axes)
        if self.way == SHM and all(self.hosts.together(group) for group in groups):
            return open_shm_transport(self._rank, mine, self.exchange, self._timeout_s, trace)
        pairs = [(a, b) for group in groups for a in group for b in group if a < b]
        return TorchTransport(self._rank, pairs, self._timeout_s, trace)

    # --- parts ---------------------------------------------------------------------------------

    def _torch_group(self, groups: Sequence[tuple[int, ...]]) -> Group:
        if len(groups) == 1 and len(groups[0]) == len(self._everyone):
            return WorldGroup(self._everyone, self._rank)
        made = [new_group(ranks, self._rank, self._timeout_s) for ranks in groups]
        return next(group for group in made if group is not None)

    def _shared_group(self, axes: tuple[str, ...]) -> Group | None:
        """Return a group that shares memory where it can, or None if a rank got none of it."""
        parts = {group: self.hosts.parts(group) for group in self._mesh.groups(axes)}
        if all(len(part) == 1 for group in parts.values() for part in group):
            return None  # one rank a host everywhere: nobody to share with
        mine = parts[self._mesh.group_of(self._rank, axes)]
        inside = self._inside(next(part for part in mine if self._rank in part))
        between = self._between(list(parts.values()))
        if not self._all_succeeded(inside is not None):
            for group in (inside, between):
                if group is not None:
                    group.close()
            return None
        assert inside is not None
        if len(mine) == 1:
            return inside
        return SpanningGroup(self._rank, mine, inside, between)

    def _inside(self, ranks: tuple[int, ...]) -> Group | None:
        """Return the group of the ranks on this host, or None if there is no memory for it."""
        if len(ranks) == 1:
            for _ in range(2):
                self.exchange("")  # others meet now
            return SoloGroup(self._rank)
        small, large = (
            connect_mesh(self._rank, ranks, self._exchange_named, self._timeout_s) for _ in range(2)
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

    def _exchange_named(self, text: str) -> list[str]:
        return [other for other in self.exchange(text) if other]

    def _between(self, all_parts: list[list[tuple[int, ...]]]) -> Group | None:
        """Make the groups of the first ranks of every host; return this rank's, if it is one."""
        firsts = [tuple(part[0] for part in parts) for parts in all_parts if len(parts) > 1]
        made = [new_group(tuple(sorted(ranks)), self._rank, self._timeout_s) for ranks in firsts]
        return next((group for group in made if group is not None), None)

    def _all_succeeded(self, succeeded: bool) -> bool:
        failures = torch.tensor([0 if succeeded else 1])
        self._world.all_reduce(failures, MAX).wait()
        return int(failures) == 0


def _packed(text: str) -> Tensor:
    data = text.encode()
    assert len(data) < _TEXT_BYTES, "texts of a meeting are short"
    return torch.frombuffer(bytearray(data.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _unpacked(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode()
