"""A group over an MPI communicator: MPI moves the bytes, Ganglion sums them in order of rank.

MPI promises no order of its sums and has no bfloat16, so its reductions are not used. Each
collective begins with a message from every member to every other: its call and, if they are few,
the data. So errors can name members that disagree or stay away. More data go through MPI's own
collectives when all have agreed:

    small     call + data ->  combine
    large     call -> all-to-all of slices -> combine my slice -> all-gather of slices

Both give the same bits, those of the other transports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm.calls import Call, PeerCall, check_agreement
from ganglion.execute.comm.checked_group import CheckedGroup
from ganglion.execute.comm.mpi.blocks import Blocks
from ganglion.execute.comm.mpi.progress import Activity, Progress
from ganglion.execute.comm.reduce_order import combine, combine_by_tree
from ganglion.execute.comm.transport import name_ranks

EAGER_BYTES = 1 << 14
_HEAD_BYTES = 64  # a call, padded so that data behind it are aligned
_TAG = 1
_CLOSE_S = 2.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Requests = Sequence[MPI.Request]


def as_bytes(flat: Tensor) -> Bytes:
    """Return the memory of a flat tensor of any dtype."""
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


class Slices:
    """A flat tensor cut into one slice for each member; lengths differ by at most one element.

    scatter      member i gets slice i of every member, to combine them
    gather_all   every member gets the combined slices
    gather       one member gets them
    """

    def __init__(self, flat: Tensor, size: int, blocks: Blocks) -> None:
        """Cut `flat` into `size` slices; received data lie in `blocks`."""
        self._flat = flat
        self._blocks = blocks
        self._bounds = [flat.numel() * i // size for i in range(size + 1)]
        item = flat.element_size()
        edges = [bound * item for bound in self._bounds]
        self._starts = edges[:-1]
        self._counts = [end - start for start, end in pairwise(edges)]

    def of(self, index: int) -> Tensor:
        """Return the slice at a position, in place."""
        return self._flat[self._bounds[index] : self._bounds[index + 1]]

    def scatter(self, comm: MPI.Intracomm, index: int) -> tuple[list[Tensor], MPI.Request]:
        """Start to collect slice `index` of every member; return the parts and the request."""
        size = len(self._counts)
        mine = self._counts[index]
        parts = self._blocks.take(size * mine)
        request = comm.Ialltoallv(
            [as_bytes(self._flat), (self._counts, self._starts), MPI.BYTE],
            [parts.numpy(), ([mine] * size, [mine * i for i in range(size)]), MPI.BYTE],
        )
        return list(parts.view(self._flat.dtype).view(size, -1)), request

    def gather_all(self, comm: MPI.Intracomm) -> MPI.Request:
        """Start to fill every member's tensor with the slices of all."""
        return comm.Iallgatherv(MPI.IN_PLACE, self._layout())

    def gather(self, comm: MPI.Intracomm, mine: Tensor, index: int, root: int) -> MPI.Request:
        """Start to fill the tensor of the member at `root` with the slices of all."""
        target = self._layout() if index == root else None
        return comm.Igatherv([as_bytes(mine), MPI.BYTE], target, root)

    def _layout(self) -> Any:
        return [as_bytes(self._flat), (self._counts, self._starts), MPI.BYTE]


class MpiHandle:
    """A started collective."""

    def __init__(self, group: MpiGroup, call: Call) -> None:
        self._group = group
        self.call = call
        self.started_s = time.perf_counter()
        self.finished_s: float | None = None
        self.error: CommError | None = None
        self.activity = Activity.AWAITING
        self.work: Iterator[Requests] = iter(())
        self.requests: Requests = ()

    @property
    def done(self) -> bool:
        """Whether the collective has ended or failed."""
        return self.finished_s is not None or self.error is not None

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self.done

    def wait(self) -> None:
        """Return when the result is in place; raise CommError if it will never be."""
        if not self.done:
            self._group.finish(self)
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error


class MpiGroup(CheckedGroup):
    """Collectives between the processes of one communicator, which the group owns.

    A member that waits longer than the deadline fails the group, too.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        comm: MPI.Intracomm,
        progress: Progress,
        timeout_s: float,
    ) -> None:
        """Join the members `ranks` as `rank`; positions in `comm` are positions in `ranks`."""
        super().__init__(ranks, rank, "MPI")
        self._comm = comm
        self._progress = progress
        self._timeout_s = timeout_s
        self._blocks = Blocks()
        self._num_calls = 0
        self._jobs: deque[MpiHandle] = deque()
        self._sends: deque[MPI.Request] = deque()
        self._others = tuple(i for i in range(self.size) if i != self.index)
        self._slots = {i: bytearray(_HEAD_BYTES + EAGER_BYTES) for i in self._others}
        self._statuses = [MPI.Status() for _ in self._others]
        progress.add(self)

    def close(self) -> None:
        """Free the communicator; unfinished collectives fail."""
        if self._comm == MPI.COMM_NULL:
            return
        healthy = self._failure.record(
            CommError(f"the group of ranks {list(self.ranks)} is closed")
        )
        sent = self._progress.wait(lambda: not self._sends, _CLOSE_S)
        self._progress.remove(self)
        # After a failure messages may be left, which another communicator with this one's number
        # would get, and MPI may still write to the memory of unfinished collectives.
        if healthy and sent and not self._jobs:
            self._comm.Free()

    def finish(self, job: MpiHandle) -> None:
        """Advance collectives until `job` is done; fail the group at the deadline."""
        if not self._progress.wait(lambda: job.done, self._timeout_s):
            with self._progress.turn:
                if not job.done:
                    self._fail(self._timeout_error())

    def advance(self) -> Activity:
        """Advance the first unfinished collective; the next ones wait for it."""
        while self._sends and self._sends[0].Test():
            self._sends.popleft()
        while self._jobs and not self._jobs[0].error:
            job = self._jobs[0]
            try:
                if not self._advanced(job):
                    return job.activity
            except CommError as error:
                self._fail(error)
            except MPI.Exception as error:
                self._fail(self._translated(job.call, error))
            except Exception as error:
                # The members are out of step now, whatever the error.
                self._fail(CommError(f"{job.call} failed on one rank: {error!r}"))
        return Activity.AWAITING if self._sends else Activity.IDLE

    def _advanced(self, job: MpiHandle) -> bool:
        """Take the next step of `job` if its requests are complete; return whether they were."""
        waits_for_calls = job.activity == Activity.AWAITING and job.requests
        statuses = self._statuses if waits_for_calls else None
        if not MPI.Request.Testall(job.requests, statuses):
            return False
        # The caller may be in inference mode, which is a property of its thread.
        with torch.inference_mode():
            job.requests = next(job.work, ())
        if not job.requests:
            self._jobs.popleft()
            job.finished_s = time.perf_counter()
        return True

    def _next_number(self) -> int:
        return self._num_calls + 1

    def _start(self, call: Call, source: Tensor, target: Tensor) -> MpiHandle:
        self._num_calls += 1
        job = MpiHandle(self, call)
        job.work = self._steps(job, source, target)
        head = call.pack().ljust(_HEAD_BYTES, b"\0")
        small = 0 < call.num_bytes <= EAGER_BYTES
        data = as_bytes(source).data if small else memoryview(b"")
        for peer in self._others:
            record = head + bytes(self._piece(call, data, peer))
            self._sends.append(self._comm.Isend([record, MPI.BYTE], peer, _TAG))
        self._jobs.append(job)
        self._progress.notify()
        return job

    def _steps(self, job: MpiHandle, source: Tensor, target: Tensor) -> Iterator[Requests]:
        """Yield the requests of one collective, step by step."""
        call = job.call
        yield [self._comm.Irecv([self._slots[i], MPI.BYTE], i, _TAG) for i in self._others]
        self._check_calls(call)
        if call.num_bytes > EAGER_BYTES:
            job.activity = Activity.MOVING
            yield from self._exchange(call, source, target)
        elif call.num_bytes:
            parts = [self._own_part(call, source)] * self.size
            for i, status in zip(self._others, self._statuses, strict=True):
                count = (status.Get_count(MPI.BYTE) - _HEAD_BYTES) // call.dtype.itemsize
                if count:
                    data = memoryview(self._slots[i])[_HEAD_BYTES:]
                    parts[i] = torch.frombuffer(data, dtype=call.dtype, count=count)
            self._combine(call, parts, target)

    def _exchange(self, call: Call, source: Tensor, target: Tensor) -> Iterator[Requests]:
        """Yield the requests of a large collective, after all members have agreed."""
        if call.kind == "broadcast":
            yield [self._comm.Ibcast([as_bytes(target), MPI.BYTE], call.root)]
            return
        whole = target if call.kind == "all_gather" else source
        slices = Slices(whole, self.size, self._blocks)
        mine = slices.of(self.index)
        if call.kind == "all_gather":
            if mine.data_ptr() != source.data_ptr():
                mine.copy_(source)
            yield [slices.gather_all(self._comm)]
            return
        parts, sent = slices.scatter(self._comm, self.index)
        yield [sent]
        if call.kind == "reduce_scatter":
            combine(parts, target, call.op)
        elif call.kind == "all_reduce":
            combine(parts, mine, call.op)
            yield [slices.gather_all(self._comm)]
        else:
            total = torch.empty_like(mine)
            combine_by_tree(parts, call.root, total, call.op)
            yield [slices.gather(self._comm, total, self.index, call.root)]

    def _check_calls(self, call: Call) -> None:
        size = len(call.pack())
        records = {i: bytes(self._slots[i][:size]) for i in self._others}
        others = {i: PeerCall(call.number, record, b"") for i, record in records.items()}
        check_agreement(self.ranks, call, others)

    def _fail(self, error: CommError) -> None:
        failure = self._failure.fail(error)
        for job in self._jobs:
            job.error = failure

    def _timeout_error(self) -> PeerLost:
        """Return the error for the passed deadline of the first unfinished collective."""
        job = self._jobs[0]
        lagging = list(self.ranks)
        if job.activity == Activity.AWAITING and job.requests:
            pairs: Mapping[int, MPI.Request] = dict(zip(self._others, job.requests, strict=True))
            lagging = [self.ranks[i] for i, r in pairs.items() if not r.Get_status()]
        return PeerLost(
            f"{job.call} of ranks {list(self.ranks)} did not end within {self._timeout_s:g} s: "
            f"{name_ranks(lagging)} stayed silent; look for the first error in the logs of the "
            f"other ranks"
        )

    def _translated(self, call: Call, error: MPI.Exception) -> CommError:
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return ProtocolError(
                f"{call} of ranks {list(self.ranks)} met data of another size: every member must "
                f"call the same collectives in the same order ({error})"
            )
        return PeerLost(
            f"{call} of ranks {list(self.ranks)} failed: another rank died; look for the first "
            f"error in the logs of the other ranks ({error})"
        )
