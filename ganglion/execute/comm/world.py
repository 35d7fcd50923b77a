"""The world of one rank: its place in the mesh, and its groups and transports along any axes.

Code that reduces over `data` asks for `world.group("data")`, whatever carries it. Only checkpoints
use torch's own process group, which torch's checkpoint library needs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ganglion.decide.topology import AXES, Mesh
from ganglion.errors import CommError
from ganglion.execute.comm.collectives import Group, Handle
from ganglion.execute.comm.hosts import TORCH
from ganglion.execute.comm.traced import TracedGroup
from ganglion.execute.comm.transport import Transport
from ganglion.trace import Recorder

MakeGroup = Callable[[tuple[str, ...]], Group]
MakeTransport = Callable[[tuple[str, ...], Recorder | None], Transport]


class World:
    """One rank's place in the mesh and its groups, made on first use."""

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        group_along: MakeGroup,
        transport_along: MakeTransport | None = None,
        *,
        carrier: str = TORCH,
    ) -> None:
        """Describe the world seen by `rank`.

        `group_along(axes)` makes this rank's group, `transport_along(axes, trace)` the transport
        between its ranks; `carrier` names what carries both.
        """
        self.carrier = carrier
        self._transport_along = transport_along
        self.rank = rank
        self.mesh = mesh
        self.coordinates = mesh.coordinates(rank)
        self._group_along = group_along
        self._groups: dict[tuple[tuple[str, ...], str], Group] = {}
        self._trace: Recorder | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.num_ranks

    def group(self, *axes: str, use: str = "") -> Group:
        """Return the group along `axes`; all ranks must ask for the same groups in order.

        Collectives of one group run one after the other. Each `use` has a group of its own, which
        does not queue behind the others. Axes of size 1 make no difference.
        """
        ordered = tuple(axis for axis in AXES if axis in axes)
        long = tuple(axis for axis in ordered if self.mesh.size(axis) > 1)
        key = (long, use)
        if key not in self._groups:
            self._groups[key] = self._group_along(long)
        group = self._groups[key]
        if self._trace is None or group.size == 1:
            return group
        return TracedGroup(group, ordered, self._trace)

    def record_in(self, trace: Recorder) -> None:
        """Record every collective of the groups asked for from now on."""
        self._trace = trace if trace.enabled else None

    def open_transport(self, *axes: str, trace: Recorder | None = None) -> Transport:
        """Open a transport between the ranks along `axes`, which the caller closes.

        All ranks must ask for the same transports in order.
        """
        if self._transport_along is None:
            raise CommError("this world has one rank: there is no other to send messages to")
        return self._transport_along(tuple(axis for axis in AXES if axis in axes), trace)

    def everyone(self) -> Group:
        """Return a group of all ranks apart from every other use."""
        return self.group(*AXES, use="everyone")

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        self.everyone().barrier()

    def gather_numbers(self, numbers: list[float], among: Group | None = None) -> Tensor:
        """Return the numbers of all ranks, or of the group `among`, as a (ranks, numbers) table.

        The table holds doubles on the host.
        """
        handle, table = self.start_gather(numbers, among)
        handle.wait()
        return table

    def start_gather(
        self, numbers: list[float], among: Group | None = None
    ) -> tuple[Handle, Tensor]:
        """Start to gather every rank's numbers; return the handle and the table to be filled."""
        group = self.everyone() if among is None else among
        mine = torch.tensor(numbers, dtype=torch.float64)
        table = torch.empty(group.size * len(numbers), dtype=torch.float64)
        handle = group.all_gather(table, mine)
        return handle, table.view(group.size, len(numbers))

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank, without pickling."""
        return broadcast_text(self.everyone(), text, 0)

    def clock_offset_s(self, rounds: int = 10) -> float:
        """Measure the difference between rank 0's perf_counter and this rank's.

        Every rank reads its clock inside one gather, so the error is at most the time of that
        gather; the shortest of the rounds counts.
        """
        best: tuple[float, float] = (float("inf"), 0.0)
        for _ in range(rounds):
            start_s = time.perf_counter()
            times = self.gather_numbers([start_s])
            taken_s = time.perf_counter() - start_s
            best = min(best, (taken_s, float(times[0, 0] - start_s)))
        return best[1]

    def close(self) -> None:
        """Close every group, in the order they were made."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def broadcast_text(group: Group, text: str, root: int) -> str:
    """Return the text of the member at position `root` on every member, without pickling."""
    payload = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    size = torch.tensor([len(payload)])
    group.broadcast(size, root).wait()
    if group.index != root:
        payload = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(payload, root).wait()
    return bytes(payload.tolist()).decode().rstrip("\0")


def broadcast_tensor(
    group: Group, tensor: Tensor | None, root: int, device: torch.device
) -> Tensor:
    """Return the tensor of the member at position `root` on every member; others give None."""
    form = ""
    if tensor is not None:
        form = json.dumps([list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])
    shape, dtype = json.loads(broadcast_text(group, form, root))
    if tensor is None:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    tensor = tensor.contiguous()
    group.broadcast(tensor, root).wait()
    return tensor
