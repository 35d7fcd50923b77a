"""A group of one host: small collectives go through sockets, large ones through shared memory.

    ShmGroup --- EagerPath (small) ---- sockets: calls and data
            `--- Progress - BulkPath -- sockets: calls and signals; shared memory: data
                 (large)

Sums are taken in order of rank on both paths, so a result depends neither on timing nor on size.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Mapping
from socket import socket

import torch
from torch import Tensor

from ganglion.errors import CommError
from ganglion.execute.comm.calls import (
    GOODBYE,
    Call,
    GroupFailure,
    PeerCall,
    check_options,
    check_sizes,
    flattened,
)
from ganglion.execute.comm.collectives import SUM
from ganglion.execute.comm.reduce_order import combine as combine_in_order
from ganglion.execute.comm.reduce_order import combine_aliased, combine_by_tree
from ganglion.execute.comm.shm.bulk import BulkPath
from ganglion.execute.comm.shm.eager import EagerHandle, EagerPath, Finish
from ganglion.execute.comm.shm.group_links import GroupLinks
from ganglion.execute.comm.shm.progress import Job, Progress

SLOT_BYTES = 1 << 20
EAGER_BYTES = 1 << 16  # sent by a member to all others together in a small collective
LINGER_S = 100e-6  # about what it takes to wake a sleeping process
PeerCalls = Mapping[int, PeerCall]
_CARRIER = "shared memory"


class ShmGroup:
    """Collectives between processes of one host.

    Calls of one group must not come from two threads at once; waits may come in any order. Members
    that fail or disagree fail the whole group: every later call on every member raises.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        small: Mapping[int, socket],
        large: Mapping[int, socket],
        timeout_s: float,
        *,
        slot_bytes: int = SLOT_BYTES,
        eager_bytes: int = EAGER_BYTES,
    ) -> None:
        """Join the members `ranks` as `rank`; all must do so at the same time.

        `small` and `large` are two independent sets of connected Unix stream sockets, by peer
        rank, which the group owns from now on; the sizes must be the same on all members. Raise
        PeerLost if a member does not join within `timeout_s`, CommError on all members if one of
        them cannot get shared memory.
        """
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self._eager_bytes = eager_bytes // (self.size - 1)
        self._failure = GroupFailure()
        small_links = GroupLinks(
            ranks, small, timeout_s, takes_descriptors=False, linger_s=LINGER_S
        )
        self._eager = EagerPath(ranks, small_links, self._failure)
        links = GroupLinks(ranks, large, timeout_s, takes_descriptors=True)
        try:
            self._bulk = BulkPath(ranks, rank, links, slot_bytes, self._eager.announce)
        except BaseException:
            links.close()
            self._eager.close()
            raise
        self._bulk.end_with(self._failure)
        self._progress = Progress(self._bulk.carry, self._failure, f"collectives of {rank}")
        # Also for a group that is never closed: others must not take a normal exit for a death.
        self._release = weakref.finalize(
            self, _release, ranks, self._failure, links, self._eager, self._progress, self._bulk
        )

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor that this group's collectives need not copy.

        Its memory is shared with the members and kept until the group is closed. Without shared
        memory it is an ordinary tensor, with a warning.
        """
        self._failure.check()
        if num_elements:
            try:
                return self._bulk.arena.allocate(num_elements, dtype)
            except OSError as error:
                warnings.warn(
                    f"no shared memory for {num_elements * dtype.itemsize} bytes ({error}): "
                    f"collectives on this buffer will copy it",
                    stacklevel=2,
                )
        return torch.empty(num_elements, dtype=dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory of the first member that all have mapped, or None if it has none.

        It lives until the group is closed and no tensor uses it any more.
        """
        source = torch.empty(0, dtype=dtype)
        if self.index == 0 and num_elements:
            source = self.allocate(num_elements, dtype)
        call = self._call("share", source)._replace(num_elements=num_elements)
        job = self._carried(call, source, source)
        job.wait()
        return job.shared

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> EagerHandle | Job:
        """Combine `tensor` over all members, in place."""
        flat = flattened(tensor, _CARRIER)
        call = self._call("all_reduce", flat, op)

        def finish(calls: PeerCalls) -> None:
            combine_aliased(self._parts(flat, calls), self.index, op)

        return self._start(call, flat, flat, finish)

    def all_gather(self, output: Tensor, tensor: Tensor) -> EagerHandle | Job:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        flat, target = flattened(tensor, _CARRIER), flattened(output, _CARRIER)
        check_sizes("all_gather", self.ranks, target, flat)
        call = self._call("all_gather", flat)

        def finish(calls: PeerCalls) -> None:
            if flat.numel():
                for place, part in zip(
                    target.chunk(self.size), self._parts(flat, calls), strict=True
                ):
                    place.copy_(part)

        return self._start(call, flat, target, finish)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> EagerHandle | Job:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        flat, target = flattened(tensor, _CARRIER), flattened(output, _CARRIER)
        check_sizes("reduce_scatter", self.ranks, flat, target)
        call = self._call("reduce_scatter", flat, op)

        def finish(calls: PeerCalls) -> None:
            mine = flat.view(self.size, -1)[self.index]
            combine_in_order(self._parts(mine, calls), target, op)

        return self._start(call, flat, target, finish)

    def broadcast(self, tensor: Tensor, root: int = 0) -> EagerHandle | Job:
        """Copy the tensor of the member at position `root` to all others, in place."""
        flat = flattened(tensor, _CARRIER)
        call = self._call("broadcast", flat, root=root)

        def finish(calls: PeerCalls) -> None:
            if self.index != root and flat.numel():
                flat.copy_(_tensor(calls[root], flat.dtype))

        return self._start(call, flat, flat, finish)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> EagerHandle | Job:
        """Combine `tensor` over all members into that of the member at position `root`.

        The order is that of a binomial tree; the tensors of the others keep their values.
        """
        flat = flattened(tensor, _CARRIER)
        call = self._call("reduce", flat, op, root)

        def finish(calls: PeerCalls) -> None:
            if self.index == root:
                combine_by_tree(self._parts(flat, calls), root, flat, op)

        return self._start(call, flat, flat, finish)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._start(self._call("barrier", nothing), nothing, nothing, lambda _: None).wait()

    def close(self) -> None:
        """Release sockets, thread and shared memory; unfinished collectives fail."""
        self._release()

    def _start(
        self, call: Call, source: Tensor, target: Tensor, finish: Finish
    ) -> EagerHandle | Job:
        if call.num_bytes <= self._eager_bytes:
            return self._eager.start(call, self._pieces(call, source), finish)
        return self._carried(call, source, target)

    def _carried(self, call: Call, source: Tensor, target: Tensor) -> Job:
        self._eager.skip(call)
        job = Job(self._progress, call, source, target)
        self._progress.start(job)
        return job

    def _call(self, kind: str, flat: Tensor, op: str = "", root: int = 0) -> Call:
        """Check the options and return the call with the next number."""
        self._failure.check()
        check_options(kind, self.ranks, op, root, flat.dtype)
        return Call(self._eager.next_number, kind, op, flat.dtype, root, flat.numel())

    def _pieces(self, call: Call, source: Tensor) -> list[bytes]:
        """Return the data for each member."""
        # One call instead of three of torch, each of which costs more than a small copy.
        data = ctypes.string_at(source.data_ptr(), call.num_bytes)
        if call.kind == "reduce_scatter":
            step = len(data) // self.size
            return [data[i * step : (i + 1) * step] for i in range(self.size)]
        if call.kind == "broadcast":
            return [data if self.index == call.root else b""] * self.size
        if call.kind == "reduce":
            return [data if i == call.root else b"" for i in range(self.size)]
        return [data] * self.size

    def _parts(self, mine: Tensor, calls: PeerCalls) -> list[Tensor]:
        """Return the contributions of all members, in order of rank."""
        return [
            mine if i == self.index else _tensor(calls[i], mine.dtype) for i in range(self.size)
        ]


def _tensor(peer_call: PeerCall, dtype: torch.dtype) -> Tensor:
    if not peer_call.payload:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(peer_call.payload), dtype=dtype)


def _release(
    ranks: tuple[int, ...],
    failure: GroupFailure,
    links: GroupLinks,
    eager: EagerPath,
    progress: Progress,
    bulk: BulkPath,
) -> None:
    failure.record(CommError(f"the group of ranks {list(ranks)} is closed"))
    links.send_last(GOODBYE)
    progress.close()
    bulk.close()
    eager.close()
