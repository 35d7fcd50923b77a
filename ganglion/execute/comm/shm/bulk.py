"""Carrying a large collective: members agree on the call, then work slab by slab or directly."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from ganglion.errors import CommError
from ganglion.execute.comm.calls import Arrival, Call, Hello, check_agreement, pack_failure
from ganglion.execute.comm.fate import Fate
from ganglion.execute.comm.shm.direct import work_directly
from ganglion.execute.comm.shm.progress import Job
from ganglion.execute.comm.shm.segment import Arena, Segment, map_segment
from ganglion.execute.comm.shm.signals import Link, Links
from ganglion.execute.comm.shm.staging import NUM_SLOTS, Program, Staging, program_of


class Carrier:
    """One member's part in the large collectives of a group."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        links: Links,
        slot_bytes: int,
        announce: Callable[[Call], None],
    ) -> None:
        """Exchange staging memory with the others; raises CommError if a member has none.

        `announce` is called with a call that the others do not join.
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

    def decide(self, fate: Fate) -> None:
        """Let a failure of the group end the waits of all members."""
        fate.on_failure(lambda error: self._links.tell(pack_failure(error)))

    def carry(self, job: Job) -> None:
        """Take part in one collective, from the first word to the last byte."""
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
        """Let all members see what the first one allocated, if it could."""
        with torch.inference_mode(False):  # else it could not be written to outside of it
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
        arrivals = {link.index: link.inbox.calls.popleft() for link in self._links}
        check_agreement(self._ranks, call, arrivals)
        others = {link.index: self._accept(link, arrivals[link.index]) for link in self._links}
        return [others.get(index, mine) for index in range(len(self._ranks))]

    def _send_call(self, call: Call, place: tuple[int, Segment, int] | None) -> None:
        record = call.pack()
        if place is None or not call.segment_bytes:
            for link in self._links:
                link.send(record)
            return
        number, segment, _ = place
        for link in self._links:
            link.send(record, segment.descriptor)
        segment.close()
        self._known.add(number)

    def _accept(self, link: Link, arrival: Arrival) -> Call:
        call = arrival.call()
        if call.segment_bytes:
            memory = _map_received(link, call.segment_bytes)
            self._mapped[link.index, call.segment] = memory
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
        return Staging([memories.get(i, mine.memory) for i in range(len(self._ranks))], self._index)


def _reserve(num_bytes: int) -> tuple[Segment | None, str]:
    try:
        return Segment(num_bytes), ""
    except OSError as error:
        return None, f"({error})"


def _map_received(link: Link, num_bytes: int) -> Tensor:
    descriptor = link.inbox.descriptors.popleft()
    try:
        return map_segment(descriptor, num_bytes)
    finally:
        os.close(descriptor)
