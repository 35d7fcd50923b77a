"""Messages over torch.distributed: Gloo between hosts, NCCL between GPUs.

torch's requests cannot be polled: a Gloo receive never shows as complete before a wait, a wait that
times out closes the connection, and a dropped send loses its message. So threads wait, without the
GIL, and put arrivals and failures into one queue:

    post    -> isend header, isend payload -> [thread: waits for both, then frees them]
    receive <- queue <- [thread, one for each peer: header, payload, header, payload ...]

Each direction of a pair has a process group of its own, so that no message waits for one that goes
the other way. Headers go over the backend of the CPU, payloads over that of their device.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ganglion.errors import CommError, ProtocolError
from ganglion.execute.comm.message import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    MAX_FORM_BYTES,
    Arrival,
    Forms,
    Numbers,
    local_arrival,
    make_header,
    plain_copy,
)
from ganglion.execute.comm.torch.group import new_group
from ganglion.execute.comm.transport import Transport, death_error, departure_error, timeout_error
from ganglion.trace import Recorder

_RECORD = struct.Struct("<Qqqqqq")  # bytes of the form, 0 for a goodbye; numbers of the message
_RECORD_BYTES = _RECORD.size + MAX_FORM_BYTES
_FOREVER = timedelta(days=365)  # `receive` has the deadline
_CLOSE_S = 2.0


class _Lost(NamedTuple):
    source: int
    reason: str | CommError


class _Departed(NamedTuple):
    source: int


ReceiveQueue = queue.SimpleQueue[Arrival | _Lost | _Departed]


class TorchTransport(Transport):
    """Carries messages between pairs of ranks of torch's world."""

    def __init__(
        self,
        rank: int,
        pairs: Sequence[tuple[int, int]],
        timeout_s: float,
        trace: Recorder | None = None,
    ) -> None:
        """Connect the ranks of each pair within `timeout_s`.

        Every rank of the world must call this with the same pairs.
        """
        known = {(min(pair), max(pair)) for pair in pairs}
        super().__init__(rank, {r for pair in known if rank in pair for r in pair} - {rank}, trace)
        self._inbox: ReceiveQueue = queue.SimpleQueue()
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[int, _Receiver] = {}
        for low, high in sorted(known):
            for source, target in ((low, high), (high, low)):
                group = new_group((low, high), rank, timeout_s)
                if group is not None and rank == source:
                    self._senders[target] = _Sender(rank, target, group.process_group)
                elif group is not None:
                    self._receivers[source] = _Receiver(source, group.process_group, self._inbox)
        for source, receiver in self._receivers.items():
            receiver.start(self._senders[source])

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        """Wait for the next arrival of any source; see Transport."""
        end_s = time.monotonic() + timeout_s
        while (arrival := self._next(end_s)) is None:
            self._raise_if_broken(f"awaited {awaiting}")
            if self.peers and len(self._departed) == len(self.peers):
                raise departure_error(self.rank, self._departed, f"awaited {awaiting}")
            if time.monotonic() >= end_s:
                silent = set(self.peers) - self._departed
                raise timeout_error(self.rank, silent, timeout_s, awaiting)
        return arrival

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival if one comes in time; see Transport."""
        end_s = time.monotonic() + timeout_s
        while not self._inbox.empty() or (not self._broken and time.monotonic() < end_s):
            arrival = self._next(end_s)
            if arrival is not None:
                return arrival
        self._raise_if_broken("looked for messages")
        return None

    def flush(self, timeout_s: float) -> None:
        """Return when everything posted was handed over; see Transport."""
        end_s = time.monotonic() + timeout_s
        for target, sender in self._senders.items():
            if not sender.flush(end_s - time.monotonic()):
                raise timeout_error(self.rank, [target], timeout_s, "room for what it posted")

    def close(self) -> None:
        """Send a goodbye, end the threads and destroy the groups; see Transport."""
        for sender in self._senders.values():
            sender.send_bye()
        end_s = time.monotonic() + _CLOSE_S
        parts: list[_Receiver | _Sender] = [*self._receivers.values(), *self._senders.values()]
        for part in parts:
            part.thread.join(max(0.0, end_s - time.monotonic()))
            dist.destroy_process_group(part.group)
        self._senders.clear()
        self._receivers.clear()

    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        if target == self.rank:
            copy = plain_copy(tensor, tensor.device)
            self._inbox.put(local_arrival(self.rank, kind, copy, numbers))
        elif target in self._senders:
            self._senders[target].post(kind, tensor, numbers)
        else:
            raise ProtocolError(
                f"rank {self.rank} has no connection to rank {target}, only to "
                f"{list(self.peers)}: open the transport with all pairs of ranks that talk"
            )

    def _next(self, end_s: float) -> Arrival | None:
        """Take one entry of the queue, without waiting after a loss; return it if an arrival."""
        wait_s = 0.0 if self._broken else max(0.0, end_s - time.monotonic())
        try:
            entry = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(entry, Arrival):
            tensor = entry.tensor
            if tensor.is_cuda:  # the allocator must know the stream that uses it from here on
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            return self._recorded(entry)
        self._departed.add(entry.source)
        if isinstance(entry, _Lost):
            self._broken[entry.source] = entry.reason
        return None


class _Sender:
    """Starts sends to one peer, and a thread that keeps each handle until it is complete."""

    def __init__(self, rank: int, target: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank = rank
        self._target = target
        self._forms = Forms()
        self._handles: queue.SimpleQueue[list[tuple[dist.Work, Tensor]] | None]
        self._handles = queue.SimpleQueue()
        self._num_unsent = 0
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._is_closed = False
        self.thread = threading.Thread(target=self._wait_for_all, daemon=True)
        self.thread.start()

    def post(self, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        device = HOST_MEMORY if tensor.is_cpu else DEVICE_MEMORY
        form = self._forms.pack(kind, tensor.shape, tensor.dtype, device)
        with self._changed:
            doing = f"sent a message of kind {kind!r}"
            if self._failure is not None:
                raise death_error(self._rank, self._target, self._failure, doing)
            if self._is_closed:
                raise departure_error(self._rank, [self._target], doing)
            try:
                self._start(form, tensor, numbers)
            except RuntimeError as error:
                raise death_error(self._rank, self._target, str(error), doing) from error

    def send_bye(self) -> None:
        """Send a goodbye, unless that was done before."""
        with self._changed:
            if not self._is_closed and self._failure is None:
                with contextlib.suppress(RuntimeError):  # the peer is gone
                    self._start(b"", None, (-1, -1, -1, -1, -1))
            if not self._is_closed:
                self._handles.put(None)
            self._is_closed = True

    def fail(self, failure: str) -> None:
        """Send nothing more, not even a goodbye: the other direction has broken."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Return whether all was handed over in time; raise PeerLost if it never will be."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._num_unsent == 0 or self._failure is not None, max(0.0, timeout_s)
            )
            if self._failure is not None:
                raise death_error(self._rank, self._target, self._failure, "handed messages over")
            return done

    def _start(self, form: bytes, tensor: Tensor | None, numbers: Numbers) -> None:
        packed = bytearray(_RECORD_BYTES)
        _RECORD.pack_into(packed, 0, len(form), *numbers)
        packed[_RECORD.size : _RECORD.size + len(form)] = form
        works = [self._send(torch.frombuffer(packed, dtype=torch.uint8))]
        if tensor is not None and tensor.nbytes:
            works.append(self._send(_as_bytes(plain_copy(tensor, tensor.device))))
        self._num_unsent += 1
        self._handles.put(works)

    def _send(self, data: Tensor) -> tuple[dist.Work, Tensor]:
        work = dist.isend(data, self._target, group=self.group)
        assert work is not None, "this rank is in the group"
        return work, data

    def _wait_for_all(self) -> None:
        while (works := self._handles.get()) is not None:
            try:
                for work, data in works:
                    _finish(work, data)
            except RuntimeError as error:
                self._settle(str(error))
                return
            self._settle(None)

    def _settle(self, failure: str | None) -> None:
        with self._changed:
            self._num_unsent -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()


class _Receiver:
    """A thread that puts everything one peer sends into the queue."""

    def __init__(self, source: int, group: dist.ProcessGroup, inbox: ReceiveQueue) -> None:
        self.group = group
        self._source = source
        self._inbox = inbox
        self._forms = Forms()

    def start(self, back: _Sender) -> None:
        """Start the thread; it answers a goodbye over `back`, which ends the peer's thread too."""
        self.thread = threading.Thread(target=self._run, args=(back,), daemon=True)
        self.thread.start()

    def _run(self, back: _Sender) -> None:
        try:
            while (arrival := self._receive()) is not None:
                self._inbox.put(arrival)
        except CommError as error:
            self._inbox.put(_Lost(self._source, error))
        except RuntimeError as error:
            back.fail(str(error))
            self._inbox.put(_Lost(self._source, str(error)))
        else:
            back.send_bye()
            self._inbox.put(_Departed(self._source))

    def _receive(self) -> Arrival | None:
        """Return the next message, or None for a goodbye."""
        packed = torch.empty(_RECORD_BYTES, dtype=torch.uint8)
        self._fill(packed)
        data = packed.numpy().tobytes()
        size, step, stage, microbatch, version, flow = _RECORD.unpack_from(data)
        if size == 0:
            return None
        form = self._forms.parse(data[_RECORD.size : _RECORD.size + size], self._source)
        device = "cuda" if form.device == DEVICE_MEMORY else "cpu"
        tensor = torch.empty(form.shape, dtype=form.dtype, device=device)
        if form.num_bytes:
            self._fill(_as_bytes(tensor))
        header = make_header(form, (step, stage, microbatch, version, flow))
        return Arrival(self._source, header, tensor)

    def _fill(self, data: Tensor) -> None:
        work = dist.irecv(data, self._source, group=self.group)
        assert work is not None, "this rank is in the group"
        _finish(work, data)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor of any dtype as bytes."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.reshape(-1).view(torch.uint8)


def _finish(work: dist.Work, data: Tensor) -> None:
    """Block this thread, without the GIL, until the data have been moved."""
    if not data.is_cuda:
        work.wait(_FOREVER)
        return
    # NCCL's wait only orders streams. An event on a stream of this thread shows when the data are
    # there, without a halt of the whole device.
    with torch.cuda.stream(torch.cuda.Stream(data.device)):  # type: ignore[no-untyped-call]
        work.wait()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    event.synchronize()
