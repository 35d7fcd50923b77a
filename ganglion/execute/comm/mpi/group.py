"""A group over an MPI communicator: MPI moves the bytes, Ganglion adds them up, in order of rank.

MPI promises no order of its sums and knows no bfloat16, so its reductions are not used. Each
collective begins with a message from every member to every other, sent when it is started: what it
calls and, if that is little, the data. So members that disagree or stay away can be named. More
data go through MPI's own collectives once all have agreed:

    small     call + data ->  combine
    large     call -> all-to-all of slices -> combine my slice -> all-gather of slices

Both give the same bits, those of the other transports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm.call_checks import check_options, check_sizes, flattened
from ganglion.execute.comm.calls import Arrival, Call, check_agreement
from ganglion.execute.comm.collectives import SUM
from ganglion.execute.comm.fate import Fate
from ganglion.execute.comm.mpi.blocks import Blocks
from ganglion.execute.comm.mpi.progress import Activity, Progress
from ganglion.execute.comm.mpi.slices import Slices, as_bytes
from ganglion.execute.comm.reduce_order import combine, combine_aliased, combine_by_tree
from ganglion.execute.comm.transport import name_ranks

EAGER_BYTES = 1 << 14
_HEAD_BYTES = 64  # a call, padded so that data behind it are aligned
_TAG = 1
_PARTING_S = 2.0
_CARRIER = "MPI"

Requests = Sequence[MPI.Request]
Finish = Callable[[list[Tensor]], None]
Exchange = Callable[[], Iterator[Requests]]


class MpiHandle:
    """A started collective."""

    def __init__(self, group: MpiGroup, call: Call) -> None:
        """Wait through `group`."""
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
        """Whether there is nothing left to wait for."""
        return self.finished_s is not None or self.error is not None

    def is_done(self) -> bool:
        """Say, without waiting, whether `wait` would return or raise at once."""
        return self.done

    def wait(self) -> None:
        """Return when the result is in place; raise CommError if it will never be."""
        if not self.done:
            self._group.finish(self)
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error


class MpiGroup:
    """Collectives between the processes of one communicator, which the group owns.

    Calls of one group must not come from two threads at once; waits may come in any order. A
    member that waits longer than the deadline, and members that disagree, fail the group.
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
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self._comm = comm
        self._progress = progress
        self._timeout_s = timeout_s
        self._fate = Fate()
        self._blocks = Blocks()
        self._num_calls = 0
        self._jobs: deque[MpiHandle] = deque()
        self._sends: deque[MPI.Request] = deque()
        self._others = tuple(i for i in range(self.size) if i != self.index)
        self._slots = {i: bytearray(_HEAD_BYTES + EAGER_BYTES) for i in self._others}
        self._statuses = [MPI.Status() for _ in self._others]
        progress.add(self)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor; MPI needs no special memory."""
        return torch.empty(num_elements, dtype=dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return None: members may be on different hosts."""
        return None

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> MpiHandle:
        """Combine `tensor` over all members, in place."""
        flat = flattened(tensor, _CARRIER)

        def finish(parts: list[Tensor]) -> None:
            combine_aliased(parts, self.index, op)

        def exchange() -> Iterator[Requests]:
            slices = Slices(flat, self.size, self._blocks)
            parts, sent = slices.scatter(self._comm, self.index)
            yield [sent]
            combine(parts, slices.of(self.index), op)
            yield [slices.gather_all(self._comm)]

        return self._start(self._call("all_reduce", flat, op), flat, finish, exchange)

    def all_gather(self, output: Tensor, tensor: Tensor) -> MpiHandle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        flat, target = flattened(tensor, _CARRIER), flattened(output, _CARRIER)
        check_sizes("all_gather", self.ranks, target, flat)

        def finish(parts: list[Tensor]) -> None:
            for place, part in zip(target.view(self.size, -1), parts, strict=True):
                place.copy_(part)

        def exchange() -> Iterator[Requests]:
            slices = Slices(target, self.size, self._blocks)
            mine = slices.of(self.index)
            if mine.data_ptr() != flat.data_ptr():
                mine.copy_(flat)
            yield [slices.gather_all(self._comm)]

        return self._start(self._call("all_gather", flat), flat, finish, exchange)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> MpiHandle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        flat, target = flattened(tensor, _CARRIER), flattened(output, _CARRIER)
        check_sizes("reduce_scatter", self.ranks, flat, target)

        def finish(parts: list[Tensor]) -> None:
            parts[self.index] = parts[self.index].clone()  # `output` may lie in `tensor`
            combine(parts, target, op)

        def exchange() -> Iterator[Requests]:
            parts, sent = Slices(flat, self.size, self._blocks).scatter(self._comm, self.index)
            yield [sent]
            combine(parts, target, op)

        return self._start(self._call("reduce_scatter", flat, op), flat, finish, exchange)

    def broadcast(self, tensor: Tensor, root: int = 0) -> MpiHandle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        flat = flattened(tensor, _CARRIER)

        def finish(parts: list[Tensor]) -> None:
            if self.index != root:
                flat.copy_(parts[root])

        def exchange() -> Iterator[Requests]:
            yield [self._comm.Ibcast([as_bytes(flat), MPI.BYTE], root)]

        return self._start(self._call("broadcast", flat, root=root), flat, finish, exchange)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> MpiHandle:
        """Combine `tensor` over all members into that of the member at position `root`.

        The order is that of a binomial tree; the tensors of the others keep their values.
        """
        flat = flattened(tensor, _CARRIER)

        def finish(parts: list[Tensor]) -> None:
            if self.index == root:
                combine_by_tree(parts, root, flat, op)

        def exchange() -> Iterator[Requests]:
            slices = Slices(flat, self.size, self._blocks)
            parts, sent = slices.scatter(self._comm, self.index)
            yield [sent]
            mine = torch.empty_like(slices.of(self.index))
            combine_by_tree(parts, root, mine, op)
            yield [slices.gather(self._comm, mine, self.index, root)]

        return self._start(self._call("reduce", flat, op, root), flat, finish, exchange)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        nothing = torch.empty(0, dtype=torch.uint8)
        call = self._call("barrier", nothing)
        self._start(call, nothing, lambda _: None, lambda: iter(())).wait()

    def close(self) -> None:
        """Give the communicator back; unfinished collectives fail."""
        if self._comm == MPI.COMM_NULL:
            return
        healthy = self._fate.end(CommError(f"the group of ranks {list(self.ranks)} is closed"))
        sent = self._progress.wait(lambda: not self._sends, _PARTING_S)
        self._progress.remove(self)
        # After a failure messages may be left: another communicator with this one's number would
        # get them. MPI may still write to the memory of what is unfinished, too.
        if healthy and sent and not self._jobs:
            self._comm.Free()

    def finish(self, job: MpiHandle) -> None:
        """Work until `job` is done or its deadline has passed."""
        if not self._progress.wait(lambda: job.done, self._timeout_s):
            with self._progress.turn:
                if not job.done:
                    self._fail(self._silence())

    def advance(self) -> Activity:
        """Move the first unfinished collective on; the next ones must wait for it."""
        while self._sends and self._sends[0].Test():
            self._sends.popleft()
        while self._jobs and not self._jobs[0].error:
            job = self._jobs[0]
            try:
                if not self._moved_on(job):
                    return job.activity
            except CommError as error:
                self._fail(error)
            except MPI.Exception as error:
                self._fail(self._translated(job.call, error))
            except Exception as error:
                # The members are out of step now, whatever it was.
                self._fail(CommError(f"{job.call} failed on one rank: {error!r}"))
        return Activity.AWAITING if self._sends else Activity.IDLE

    def _moved_on(self, job: MpiHandle) -> bool:
        """Return whether the requests of `job` were complete, after taking its next step."""
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

    def _carry(
        self, job: MpiHandle, flat: Tensor, finish: Finish, exchange: Exchange
    ) -> Iterator[Requests]:
        """Yield the requests of one collective, step by step."""
        yield [self._comm.Irecv([self._slots[i], MPI.BYTE], i, _TAG) for i in self._others]
        self._check_calls(job.call)
        if job.call.num_bytes > EAGER_BYTES:
            job.activity = Activity.MOVING
            yield from exchange()
        elif job.call.num_bytes:
            finish(self._parts(job.call, flat))

    def _start(self, call: Call, flat: Tensor, finish: Finish, exchange: Exchange) -> MpiHandle:
        job = MpiHandle(self, call)
        job.work = self._carry(job, flat, finish, exchange)
        head = call.pack().ljust(_HEAD_BYTES, b"\0")
        for peer in self._others:
            data = head + bytes(self._payload(call, flat, peer))
            request = self._comm.Isend([data, MPI.BYTE], peer, _TAG)
            self._sends.append(request)
        self._jobs.append(job)
        self._progress.notify()
        return job

    def _payload(self, call: Call, flat: Tensor, peer: int) -> memoryview | bytes:
        """Return what goes to `peer` along with the call."""
        wanted = {"broadcast": self.index == call.root, "reduce": peer == call.root}
        if not 0 < call.num_bytes <= EAGER_BYTES or not wanted.get(call.kind, True):
            return b""
        data = as_bytes(flat).data
        if call.kind != "reduce_scatter":
            return data
        step = len(data) // self.size
        return data[peer * step : (peer + 1) * step]

    def _parts(self, call: Call, flat: Tensor) -> list[Tensor]:
        """Return what came with the calls, in order of rank, with this member's own part."""
        mine = flat.view(self.size, -1)[self.index] if call.kind == "reduce_scatter" else flat
        parts = [mine] * self.size
        for i, status in zip(self._others, self._statuses, strict=True):
            count = (status.Get_count(MPI.BYTE) - _HEAD_BYTES) // call.dtype.itemsize
            if count:
                slot = self._slots[i]
                parts[i] = torch.frombuffer(slot, dtype=call.dtype, count=count, offset=_HEAD_BYTES)
        return parts

    def _check_calls(self, call: Call) -> None:
        size = len(call.pack())
        records = {i: bytes(self._slots[i][:size]) for i in self._others}
        check_agreement(
            self.ranks, call, {i: Arrival(call.number, data, b"") for i, data in records.items()}
        )

    def _call(self, kind: str, flat: Tensor, op: str = "", root: int = 0) -> Call:
        """Check what was asked for and give it the next number."""
        self._fate.check()
        check_options(kind, self.ranks, op, root, flat.dtype)
        self._num_calls += 1
        return Call(self._num_calls, kind, op, flat.dtype, root, flat.numel())

    def _fail(self, error: CommError) -> None:
        failure = self._fate.fail(error)
        for job in self._jobs:
            job.error = failure

    def _silence(self) -> PeerLost:
        """Describe the deadline that passed for the first unfinished collective."""
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
