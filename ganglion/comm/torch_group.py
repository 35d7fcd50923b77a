"""Groups carried by torch.distributed: Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from ganglion.comm.collectives import MAX, SUM, Done, Handle
from ganglion.errors import PeerLost

_OPS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}
# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TorchHandle:
    """A started torch.distributed work whose failure names what was awaited, and from whom."""

    def __init__(self, work: dist.Work, what: str, ranks: tuple[int, ...]) -> None:
        """Wrap `work`; `what` and `ranks` go into the error message."""
        self._work = work
        self._what = what
        self._ranks = ranks

    def wait(self) -> None:
        """Block until done; a dead or silent peer becomes PeerLost."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _peer_lost(self._what, self._ranks, error) from error


class TorchGroup:
    """Collectives of one process group of torch.distributed."""

    def __init__(self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
        """Wrap `group`, whose members are `ranks`, for the member `rank`."""
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self.process_group = group

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        return self._start(
            "all_reduce",
            lambda: dist.all_reduce(tensor, _OPS[op], group=self.process_group, async_op=True),
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        return self._start(
            "all_gather",
            lambda: _all_gather(output, tensor, group=self.process_group, async_op=True),
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        return self._start(
            "reduce_scatter",
            lambda: _reduce_scatter(
                output, tensor, _OPS[op], group=self.process_group, async_op=True
            ),
        )

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        return self._start(
            "broadcast",
            lambda: dist.broadcast(tensor, group_src=root, group=self.process_group, async_op=True),
        )

    def barrier(self) -> None:
        """Return when every member has arrived."""
        self._start("barrier", lambda: dist.barrier(group=self.process_group, async_op=True)).wait()

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group(self.process_group)

    def _start(self, what: str, call: Callable[[], dist.Work | None]) -> Handle:
        try:
            work = call()
        except RuntimeError as error:
            raise _peer_lost(what, self.ranks, error) from error
        return Done() if work is None else TorchHandle(work, what, self.ranks)


class WorldGroup(TorchGroup):
    """The group of all ranks, which torch.distributed has from the start and keeps to the end."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """Wrap the default process group."""
        world = dist.group.WORLD
        assert world is not None, "ranks meet before they talk"
        super().__init__(ranks, rank, world)

    def close(self) -> None:
        """Leave the default group alone: others may hold it too."""


def new_group(ranks: tuple[int, ...], rank: int, timeout_s: float) -> TorchGroup | None:
    """Create one process group; all ranks of the world must call this, members get the group."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    return TorchGroup(ranks, rank, group) if rank in ranks else None


def _peer_lost(what: str, ranks: tuple[int, ...], error: RuntimeError) -> PeerLost:
    return PeerLost(
        f"{what} of ranks {list(ranks)} failed: another rank died or stayed silent past "
        f"train.timeout_s; look for the first error in the logs of the other ranks ({error})"
    )
