"""Groups carried by torch.distributed: Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm.background import Background
from ganglion.execute.comm.collectives import MAX, SUM, Done, Handle
from ganglion.execute.comm.reduce_order import join, tree_pairs, widened

_OPS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}
# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# What Gloo, NCCL and their stores say when a peer is gone; anything else is about the call.
_SIGNS_OF_LOSS = ("connect", "closed", "timed out", "timeout", "reset by peer", "broken pipe")
_SIGNS_OF_MISUSE = ("scalar type", "data type", "dtype")


# Tags of the messages of a tree, far from those of anybody else; several may be under way.
_TREE_TAG = 7_000_000
_NUM_TREE_TAGS = 1 << 16
_NEVER_TAG = _TREE_TAG + _NUM_TREE_TAGS  # nobody sends with it


class TorchHandle:
    """A started torch.distributed work whose failure names what was awaited, and from whom."""

    def __init__(
        self,
        work: dist.Work,
        what: str,
        ranks: tuple[int, ...],
        tensor: Tensor | None,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap `work`; `what`, `ranks` and `tensor` go into the error message."""
        self._on_loss = on_loss
        self._work = work
        self._what = what
        self._ranks = ranks
        self._tensor = tensor
        self.started_s = time.perf_counter()
        # A list of its own: a callback that held this handle, and so its work, would leak both.
        self._stamps: list[float] = []
        self._was_awaited = False
        if tensor is not None and tensor.device.type == "cpu":
            _stamp_end(work, self._stamps)

    @property
    def finished_s(self) -> float | None:
        """When the work was done; None on GPUs, whose futures are ready before their kernels."""
        return self._stamps[0] if self._stamps else None

    def is_done(self) -> bool:
        """Say, without waiting, whether `wait` would return or raise at once."""
        # Gloo's reduce_scatter shows no end, neither in a future nor as completed.
        return self._was_awaited or bool(self._stamps) or bool(self._work.is_completed())

    def wait(self) -> None:
        """Block until done; a lost peer becomes PeerLost, a refused dtype ProtocolError."""
        try:
            self._work.wait()
        except RuntimeError as error:
            text = str(error).lower()
            if any(sign in text for sign in _SIGNS_OF_MISUSE):
                raise _refused(self._what, self._ranks, self._tensor, error) from error
            self._on_loss()
            raise _peer_lost(self._what, self._ranks, error) from error
        finally:
            self._was_awaited = True


def _stamp_end(work: dist.Work, stamps: list[float]) -> None:
    try:
        future = work.get_future()
    except RuntimeError:  # Gloo's reduce_scatter has none
        return
    future.add_done_callback(lambda _: stamps.append(time.perf_counter()))


class TorchGroup:
    """Collectives of one process group of torch.distributed."""

    def __init__(self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
        """Wrap `group`, whose members are `ranks`, for the member `rank`."""
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self.process_group = group
        self._background = Background(f"reductions of rank {rank}")
        self._num_reduced = 0

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an ordinary tensor."""
        return torch.empty(num_elements, dtype=dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return None: members may be on different hosts."""
        return None

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        return self._start(
            "all_reduce",
            tensor,
            lambda: dist.all_reduce(tensor, _OPS[op], group=self.process_group, async_op=True),
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        return self._start(
            "all_gather",
            tensor,
            lambda: _all_gather(output, tensor, group=self.process_group, async_op=True),
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        return self._start(
            "reduce_scatter",
            tensor,
            lambda: _reduce_scatter(
                output, tensor, _OPS[op], group=self.process_group, async_op=True
            ),
        )

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        return self._start(
            "broadcast",
            tensor,
            lambda: dist.broadcast(tensor, group_src=root, group=self.process_group, async_op=True),
        )

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`.

        On CPUs along a binomial tree of our own, for Gloo's order is a ring's; on GPUs NCCL's.
        """
        if tensor.device.type != "cpu":
            return self._start(
                "reduce",
                tensor,
                lambda: dist.reduce(
                    tensor, group_dst=root, op=_OPS[op], group=self.process_group, async_op=True
                ),
            )
        self._num_reduced += 1
        tag = _TREE_TAG + self._num_reduced % _NUM_TREE_TAGS
        return self._background.start(lambda: self._reduce_by_tree(tensor, root, op, tag))

    def _reduce_by_tree(self, tensor: Tensor, root: int, op: str, tag: int) -> None:
        held = widened(tensor)
        other = torch.empty_like(held)
        try:
            for into, source in tree_pairs(self.size, root):
                if self.index == into:
                    dist.recv(other, group_src=source, group=self.process_group, tag=tag)
                    held = join(held, other, op)
                elif self.index == source:
                    dist.send(held, group_dst=into, group=self.process_group, tag=tag)
        except RuntimeError as error:
            raise _peer_lost("reduce", self.ranks, error) from error
        if self.index == root:
            tensor.copy_(held)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        self._start(
            "barrier", None, lambda: dist.barrier(group=self.process_group, async_op=True)
        ).wait()

    def close(self) -> None:
        """Destroy the process group."""
        self._background.close()
        dist.destroy_process_group(self.process_group)

    def _start(
        self, what: str, tensor: Tensor | None, call: Callable[[], dist.Work | None]
    ) -> Handle:
        try:
            work = call()
        except (RuntimeError, ValueError, TypeError) as error:
            raise _not_started(what, self.ranks, tensor, error) from error
        if work is None:
            return Done()
        return TorchHandle(work, what, self.ranks, tensor, self._hang_up)

    def _hang_up(self) -> None:
        """Break with all members: one may wait for what this one will never send.

        Gloo breaks only with whom it lost, and keeps the others' connections until the group is
        freed. It closes a connection on which a message does not come in time.
        """
        if dist.get_backend(self.process_group) != "gloo":
            return
        for rank in self.ranks:
            if rank != self.ranks[self.index]:
                with suppress(RuntimeError, ValueError):
                    message = dist.irecv(torch.empty(1), rank, self.process_group, tag=_NEVER_TAG)
                    if message is not None:
                        message.wait(timedelta(milliseconds=1))


class WorldGroup(TorchGroup):
    """The group of all ranks, which torch.distributed has from the start and keeps to the end."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """Wrap the default process group."""
        world = dist.group.WORLD
        assert world is not None, "ranks meet before they talk"
        super().__init__(ranks, rank, world)

    def close(self) -> None:
        """Leave the default group alone: others may hold it too."""
        self._background.close()


def new_group(ranks: tuple[int, ...], rank: int, timeout_s: float) -> TorchGroup | None:
    """Create one process group; all ranks of the world must call this, members get the group."""
    try:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:  # the store's errors, dist.DistError, are such too
        raise _peer_lost("new_group", ranks, error) from error
    return TorchGroup(ranks, rank, group) if rank in ranks else None


def _not_started(
    what: str, ranks: tuple[int, ...], tensor: Tensor | None, error: Exception
) -> CommError:
    text = str(error).lower()
    if isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_LOSS):
        return _peer_lost(what, ranks, error)
    return _refused(what, ranks, tensor, error)


def _refused(
    what: str, ranks: tuple[int, ...], tensor: Tensor | None, error: Exception
) -> ProtocolError:
    given = "" if tensor is None else f" for a tensor of {tensor.dtype}, {tuple(tensor.shape)}"
    return ProtocolError(
        f"{what} of ranks {list(ranks)} cannot be carried out{given}: {error}; give it a dtype "
        f"and a shape that torch.distributed accepts"
    )


def _peer_lost(what: str, ranks: tuple[int, ...], error: RuntimeError) -> PeerLost:
    return PeerLost(
        f"{what} of ranks {list(ranks)} failed: another rank died or stayed silent past "
        f"train.timeout_s; look for the first error in the logs of the other ranks ({error})"
    )
