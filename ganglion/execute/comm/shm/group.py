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
from ganglion.execute.comm.calls import GOODBYE, Call, PeerCall
from ganglion.execute.comm.checked_group import CheckedGroup, GroupFailure
from ganglion.execute.comm.collectives import Handle
from ganglion.execute.comm.shm.bulk import BulkPath
from ganglion.execute.comm.shm.eager import EagerPath
from ganglion.execute.comm.shm.group_links import GroupLinks
from ganglion.execute.comm.shm.progress import Job, Progress

SLOT_BYTES = 1 << 20
EAGER_BYTES = 1 << 16  # sent by a member to all others together in a small collective
LINGER_S = 100e-6  # about the time to wake a sleeping process


class ShmGroup(CheckedGroup):
    """Collectives between processes of one host."""

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
        super().__init__(ranks, rank, "shared memory")
        self._eager_bytes = eager_bytes // (self.size - 1)
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
        job = self._start_job(call, source, source)
        job.wait()
        return job.shared

    def close(self) -> None:
        """Release sockets, thread and shared memory; unfinished collectives fail."""
        self._release()

    def _next_number(self) -> int:
        return self._eager.next_number

    def _start(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        if call.num_bytes > self._eager_bytes:
            return self._start_job(call, source, target)

        def finish(calls: Mapping[int, PeerCall]) -> None:
            if call.num_bytes:
                parts = [self._own_part(call, source)] * self.size
                for index, peer_call in calls.items():
                    if peer_call.payload:
                        payload = bytearray(peer_call.payload)
                        parts[index] = torch.frombuffer(payload, dtype=call.dtype)
                self._combine(call, parts, target)

        # One call instead of three of torch, each of which costs more than a small copy.
        data = ctypes.string_at(source.data_ptr(), call.num_bytes)
        pieces = [self._piece(call, data, peer) for peer in range(self.size)]
        return self._eager.start(call, pieces, finish)

    def _start_job(self, call: Call, source: Tensor, target: Tensor) -> Job:
        self._eager.skip(call)
        job = Job(self._progress, call, source, target)
        self._progress.start(job)
        return job


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
