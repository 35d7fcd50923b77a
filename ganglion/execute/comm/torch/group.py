"""Groups over torch.distributed: Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ganglion.errors import PeerLost, ProtocolError
from ganglion.execute.comm.background import Background
from ganglion.execute.comm.collectives import MAX, SUM, BaseGroup, DoneHandle, Handle
from ganglion.execute.comm.reduce_order import combine_two, tree_pairs, widened

_OPS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}
# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Parts of the messages of Gloo, NCCL and their stores for a lost peer; others are about the call.
_SIGNS_OF_LOSS = ("connect", "closed", "timed out", "timeout", "reset by peer", "broken pipe")
_SIGNS_OF_MISUSE = ("scalar type", "data type", "dtype")

# Tags of the messages of a tree, far from all other tags; several reductions may be under way.
_TREE_TAG = 7_000_000
_NUM_TREE_TAGS = 1 << 16
_NEVER_TAG = _TREE_TAG + _NUM_TREE_TAGS  # never sent


class TorchHandle:
    """A started work of torch.distributed; its errors name the collective and the ranks."""

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
            with suppress(RuntimeError):  # Gloo's reduce_scatter has no future
                stamps = self._stamps
                work.get_future().add_done_callback(lambda _: stamps.append(time.perf_counter()))

    @property
    def finished_s(self) -> float | None:
        """When the work was done, or None on GPUs, whose futures are ready before their kernels."""
        return self._stamps[0] if self._stamps else None

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        # Gloo's reduce_scatter shows its end neither in a future nor as completed.
        return self._was_awaited or bool(self._stamps) or bool(self._work.is_completed())

    def wait(self) -> None:
        """Return when done; raise PeerLost for a lost peer, ProtocolError for a refused dtype."""
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


class TorchGroup(BaseGroup):
    """Collectives of one process group of torch.distributed."""

    def __init__(self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
        """Wrap `group`, whose members are `ranks`, for the member `rank`."""
        super().__init__(ranks, rank)
        self.process_group = group
        self._background = Background(f"reductions of rank {rank}")
        self._num_reduced = 0

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        return self._start("all_reduce", dist.all_reduce, tensor, _OPS[op])

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        return self._start("all_gather", _all_gather, output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        return self._start("reduce_scatter", _reduce_scatter, output, tensor, _OPS[op])

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        return self._start("broadcast", dist.broadcast, tensor, group_src=root)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`.

        On CPUs by our own binomial tree, because Gloo reduces along a ring; on GPUs by NCCL.
        """
        if tensor.device.type != "cpu":
            return self._start("reduce", dist.reduce, tensor, group_dst=root, op=_OPS[op])
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
                    held = combine_two(held, other, op)
                elif self.index == source:
                    dist.send(held, group_dst=into, group=self.process_group, tag=tag)
        except RuntimeError as error:
            raise _peer_lost("reduce", self.ranks, error) from error
        if self.index == root:
            tensor.copy_(held)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        if "gloo" not in dist.get_backend_config(self.process_group):
            self._start("barrier", dist.barrier).wait()
            return
        # Gloo's own barrier waits for all calls it still lists, and raises their errors: a call
        # that was refused a moment ago would fail it on one rank and block the others.
        self._start("barrier", dist.all_reduce, torch.zeros(1)).wait()

    def close(self) -> None:
        """Destroy the process group."""
        self._background.close()
        dist.destroy_process_group(self.process_group)

    def _start(
        self, what: str, function: Callable[..., dist.Work | None], *args: Any, **options: Any
    ) -> Handle:
        """Start a function of torch.distributed; the last tensor of `args` is the member's own."""
        tensor = next((arg for arg in reversed(args) if isinstance(arg, Tensor)), None)
        try:
            work = function(*args, group=self.process_group, async_op=True, **options)
        except (RuntimeError, ValueError, TypeError) as error:
            text = str(error).lower()
            if isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_LOSS):
                raise _peer_lost(what, self.ranks, error) from error
            raise _refused(what, self.ranks, tensor, error) from error
        if work is None:
            return DoneHandle()
        return TorchHandle(work, what, self.ranks, tensor, self._disconnect)

    def _disconnect(self) -> None:
        """Disconnect from all members, which may wait for what this one will never send.

        Gloo disconnects only from a lost peer, and keeps other connections until the group is
        freed. It closes a connection on which a message does not arrive in time.
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
    """The default process group of torch.distributed, of all ranks."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        world = dist.group.WORLD
        assert world is not None, "torch.distributed must be initialized first"
        super().__init__(ranks, rank, world)

    def close(self) -> None:
        """Keep the default process group, which others may hold too."""
        self._background.close()


def init_process_group(rank: int, num_ranks: int, timeout_s: float, **address: Any) -> None:
    """Open the default process group at `address`, an init_method or a store; close it at exit."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=timeout, **address)
    # Only at exit: a second init at the same store would wait for ever. A group that a user's
    # script made is the user's to destroy.
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def new_group(ranks: tuple[int, ...], rank: int, timeout_s: float) -> TorchGroup | None:
    """Make one process group; all ranks of the world must call this, only members get it."""
    try:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:  # also dist.DistError, the store's error
        raise _peer_lost("new_group", ranks, error) from error
    return TorchGroup(ranks, rank, group) if rank in ranks else None


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
