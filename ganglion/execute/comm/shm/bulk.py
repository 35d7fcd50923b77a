"""Large collectives: members agree on the call, then pass slabs or read each other's tensors.

Tensors that all live in shared memory are read directly, without a copy in, with two syncs:

    sync ("my data are final") | work on one another's memory | sync ("I am done with yours")

Others pass slab by slab through the staging memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ganglion.errors import CommError
from ganglion.execute.comm.calls import (
    Call,
    Hello,
    PeerCall,
    check_agreement,
    pack_failure,
)
from ganglion.execute.comm.checked_group import GroupFailure
from ganglion.execute.comm.reduce_order import combine, combine_aliased, combine_by_tree
from ganglion.execute.comm.shm.group_links import GroupLinks, MemberLink
from ganglion.execute.comm.shm.memory import Arena, Segment, map_shared
from ganglion.execute.comm.shm.progress import Job
from ganglion.execute.comm.shm.staging import NUM_SLOTS, Program, Staging, program_of

_CHUNK_BYTES = 1 << 18  # stays in the cache between a write and the read that follows


class BulkPath:
    """One member's part in the large collectives of a group."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        links: GroupLinks,
        slot_bytes: int,
        announce: Callable[[Call], None],
    ) -> None:
        """Exchange staging memory with the others; raise CommError if a member has none.

        `announce` is called with a call that other members have not made for a while.
        """
        self._ranks = ranks
        self._index = ranks.index(rank)
        self._links = links
        self._announce = announce
        self._num_slabs = 0
        self._mapped: dict[tuple[int, int], Tensor] = {}
        self._known: set[int] = set()
        self.arena = Arena()
        self._staging = self._share_staging(rank, NUM_SLOTS * slot_bytes)

    def end_with(self, failure: GroupFailure) -> None:
        """End the waits of all members at the failure of the group."""
        failure.on_failure(lambda error: self._links.send_last(pack_failure(error)))

    def carry(self, job: Job) -> None:
        """Take part in one collective until its result is in place."""
        if job.call.kind == "share":
            return self._share(job)
        program = program_of(job, self._staging)
        place = self.arena.find(job.source)
        if place is None:
            program.deposit(0, self._num_slabs)
        calls = self._agree(job.call, place)
        direct = [call.segment >= 0 for call in calls]
        if all(direct):
            sources = [self._source(member, call, job) for member, call in enumerate(calls)]
            work_directly(job, sources, self._index)
            return self._links.synchronize(job.call)
        if place is not None:
            program.deposit(0, self._num_slabs)
        if any(direct):  # some deposited only after they had announced their call
            self._links.synchronize(job.call)
        self._pass_slabs(job.call, program)

    def close(self) -> None:
        """Release sockets and shared memory."""
        self._links.close()
        self.arena.close()
        self._mapped.clear()
        self._staging = None  # type: ignore[assignment]

    def _share(self, job: Job) -> None:
        """Map what the first member allocated, if it got memory, on all members."""
        with torch.inference_mode(False):  # else the tensor could be written only in that mode
            first, *_ = self._agree(job.call, self.arena.find(job.source))
            if first.segment >= 0:
                job.shared = self._source(0, first, job)

    def _pass_slabs(self, call: Call, program: Program) -> None:
        first, last = self._num_slabs, program.num_slabs - 1
        two_phases = call.kind in ("all_reduce", "reduce")
        for slab in range(program.num_slabs):
            program.combine(slab, first + slab)
            if slab < last:
                program.deposit(slab + 1, first + slab + 1)
            if two_phases or slab < last:
                self._links.synchronize(call)
            program.collect(slab, first + slab)
        self._num_slabs += program.num_slabs

    def _agree(self, call: Call, place: tuple[int, Segment, int] | None) -> list[Call]:
        """Exchange calls with all members and return them, in order of rank."""
        mine = call
        if place is not None:
            number, segment, offset = place
            fresh = segment.num_bytes if number not in self._known else 0
            mine = call._replace(segment=number, segment_bytes=fresh, offset=offset)
        self._send_call(mine, place)
        self._links.wait(lambda link: bool(link.inbox.calls), call, lambda: self._announce(call))
        peer_calls = {link.index: link.inbox.calls.popleft() for link in self._links}
        check_agreement(self._ranks, call, peer_calls)
        others = {link.index: self._accept(link, peer_calls[link.index]) for link in self._links}
        return [others.get(index, mine) for index in range(len(self._ranks))]

    def _send_call(self, call: Call, place: tuple[int, Segment, int] | None) -> None:
        record, new = call.pack(), place if call.segment_bytes else None
        for link in self._links:
            link.send(record, -1 if new is None else new[1].descriptor)
        if new is not None:
            number, segment, _ = new
            segment.close()
            self._known.add(number)

    def _accept(self, link: MemberLink, peer_call: PeerCall) -> Call:
        call = peer_call.call()
        if call.segment_bytes:
            self._mapped[link.index, call.segment] = _map_received(link, call.segment_bytes)
        return call

    def _source(self, member: int, call: Call, job: Job) -> Tensor:
        if member == self._index:
            return job.source
        memory = self._mapped[member, call.segment]
        return memory[call.offset : call.offset + call.num_bytes].view(call.dtype)

    def _share_staging(self, rank: int, num_bytes: int) -> Staging:
        mine, reason = _reserve(num_bytes)
        hello = Hello(rank, 0 if mine is None else mine.num_bytes).pack()
        for link in self._links:
            link.send(hello, -1 if mine is None else mine.descriptor)
        self._links.wait(lambda link: link.inbox.hello is not None, "the making of the group")
        if mine is not None:
            mine.close()
        hellos = {link.peer: link.inbox.hello for link in self._links}
        poor = [peer for peer, hello in hellos.items() if hello and hello.staging_bytes < num_bytes]
        if mine is None or poor:
            raise CommError(
                f"ranks {sorted(poor + [rank] * (mine is None))} of the group {list(self._ranks)} "
                f"could not get {num_bytes} bytes of shared memory {reason}: free "
                f"memory or raise its limit, or use another transport"
            )
        memories = {link.index: _map_received(link, mine.num_bytes) for link in self._links}
        memories[self._index] = torch.frombuffer(mine.memory, dtype=torch.uint8)
        return Staging([memories[i] for i in range(len(self._ranks))], self._index)


def _reserve(num_bytes: int) -> tuple[Segment | None, str]:
    try:
        return Segment(num_bytes), ""
    except OSError as error:
        return None, f"({error})"


def _map_received(link: MemberLink, num_bytes: int) -> Tensor:
    descriptor = link.inbox.descriptors.popleft()
    try:
        return torch.frombuffer(map_shared(descriptor, num_bytes)[0], dtype=torch.uint8)
    finally:
        os.close(descriptor)


def work_directly(job: Job, sources: Sequence[Tensor], index: int) -> None:
    """Do this member's share; `sources[i]` is the tensor of member i, in shared memory."""
    call, size = job.call, len(sources)
    if call.kind in ("all_reduce", "reduce"):
        width = -(-call.num_elements // size)
        _reduce(call, [source[index * width : (index + 1) * width] for source in sources], index)
    elif call.kind == "reduce_scatter":
        parts = [source.chunk(size)[index] for source in sources]
        for *pieces, out in _chunks([*parts, job.target]):
            combine(pieces, out, call.op)
    elif call.kind == "all_gather":
        for place, source in zip(job.target.chunk(size), sources, strict=True):
            place.copy_(source)
    elif index != call.root:
        job.target.copy_(sources[call.root])


def _reduce(call: Call, parts: Sequence[Tensor], index: int) -> None:
    """Combine `parts`, this member's slice of every tensor, in place: everywhere or at the root."""
    for pieces in _chunks(parts):
        if call.kind == "reduce":
            combine_by_tree(pieces, call.root, pieces[call.root], call.op)
            continue
        combine_aliased(pieces, index, call.op)
        for piece in pieces:
            if piece is not pieces[index]:
                piece.copy_(pieces[index])


def _chunks(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield stretches of all parts, which have equal lengths, that fit into a cache together."""
    step = _CHUNK_BYTES // parts[0].dtype.itemsize
    for low in range(0, parts[0].numel(), step):
        yield [part[low : low + step] for part in parts]
