"""Messages over MPI: each is one MPI message with its header in front.

    [length of form | numbers | form | padding][payload]

A probe for any source finds the next message and its size; only then memory is allocated. The
header is padded, so that the payload can be used where it was received: the sender copies once, the
receiver not at all, except inside MPI. A message of no bytes is a goodbye, sent to every peer.
"""

from __future__ import annotations

import struct
from collections import deque
from contextlib import suppress
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm.message import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    NUMBERS,
    Arrival,
    Forms,
    Numbers,
    make_header,
)
from ganglion.execute.comm.mpi.blocks import Blocks
from ganglion.execute.comm.mpi.progress import Activity, Progress
from ganglion.execute.comm.transport import Transport, death_error, departure_error, timeout_error
from ganglion.trace import Recorder

_ALIGNMENT = 64
_LENGTH = struct.Struct("<H")
_START = _LENGTH.size + NUMBERS.size
_TAG = 2
_CLOSE_S = 2.0


class _Incoming(NamedTuple):
    source: int
    data: Tensor
    request: MPI.Request


class MpiTransport(Transport):
    """Carries messages between the processes of one communicator, which the transport owns."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        comm: MPI.Intracomm,
        progress: Progress,
        trace: Recorder | None = None,
    ) -> None:
        """Join `ranks` as `rank`; positions in `comm` are positions in `ranks`."""
        super().__init__(rank, {*ranks} - {rank}, trace)
        self._ranks = ranks
        self._comm = comm
        self._progress = progress
        self._forms = Forms()
        self._blocks = Blocks()
        self._sends: deque[tuple[int, MPI.Request]] = deque()
        self._incoming: list[_Incoming] = []
        self._mailbox: deque[Arrival] = deque()
        self._failure: CommError | None = None
        self._status = MPI.Status()
        self._is_closed = False
        progress.add(self)

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        """Wait for the next arrival of any source; see Transport."""
        arrival = self._next(timeout_s)
        if arrival is not None:
            return arrival
        if self._failure is not None:
            raise type(self._failure)(f"{self._failure}; rank {self.rank} awaited {awaiting}")
        if self._is_alone():
            raise departure_error(self.rank, self._departed, f"awaited {awaiting}")
        raise timeout_error(self.rank, set(self.peers) - self._departed, timeout_s, awaiting)

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival if one comes in time; see Transport."""
        arrival = self._next(timeout_s)
        if arrival is None and self._failure is not None:
            raise type(self._failure)(str(self._failure))
        return arrival

    def flush(self, timeout_s: float) -> None:
        """Return when everything posted was handed over; see Transport."""
        if not self._progress.wait(lambda: not self._sends, timeout_s):
            lagging = {target for target, _ in tuple(self._sends)}
            raise timeout_error(self.rank, lagging, timeout_s, "room for what it posted")

    def close(self) -> None:
        """Send a goodbye to every peer; see Transport."""
        if self._is_closed:
            return
        with self._progress.turn:  # the thread must not see half of this
            for peer in self.peers:
                with suppress(PeerLost):  # the peer is gone
                    self._send(peer, torch.empty(0, dtype=torch.uint8))
            self._is_closed = True
        self._progress.wait(lambda: not self._sends, _CLOSE_S)

    def advance(self) -> Activity:
        """Test sends, and receive and deliver messages in order."""
        try:
            while self._sends and self._sends[0][1].Test():
                self._sends.popleft()
            self._match()
            self._deliver()
            if self._is_closed:
                return self._wind_up()
        except MPI.Exception as error:
            self._failure = self._failure or PeerLost(
                f"MPI failed ({error}): another rank died; look for the first error in the logs of "
                f"the other ranks"
            )
        except CommError as error:
            self._failure = self._failure or error
        if self._incoming:
            return Activity.MOVING
        return Activity.AWAITING if self._sends else Activity.IDLE

    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        self._check_open()
        if target != self.rank and target not in self.peers:
            raise ProtocolError(f"rank {self.rank} has no peer {target}, only {list(self.peers)}")
        if target in self._departed:
            raise departure_error(self.rank, [target], f"sent a message of kind {kind!r}")
        self._send(target, self._packed(kind, tensor, numbers))

    def _next(self, timeout_s: float) -> Arrival | None:
        """Return the next arrival, or None at the deadline, after a failure or without peers."""
        self._check_open()
        if not self._mailbox:
            self._progress.wait(self._has_news, timeout_s)
        return self._recorded(self._mailbox.popleft()) if self._mailbox else None

    def _wind_up(self) -> Activity:
        """Discard messages after `close`, and free the communicator after the last goodbye.

        Earlier, MPI could give its number to another one, which would get this one's messages.
        """
        self._mailbox.clear()
        if self._sends or self._incoming:
            return Activity.AWAITING
        if len(self._departed) < len(self.peers):
            return Activity.IDLE
        self._comm.Free()
        return Activity.OVER

    def _match(self) -> None:
        """Start to receive every message that a probe finds."""
        while message := self._comm.Improbe(MPI.ANY_SOURCE, _TAG, self._status):
            data = self._blocks.take(self._status.Get_count(MPI.BYTE))
            request = message.Irecv([data.numpy(), MPI.BYTE])
            source = self._ranks[self._status.Get_source()]
            self._incoming.append(_Incoming(source, data, request))

    def _deliver(self) -> None:
        """Deliver complete messages, in order for each source."""
        late: set[int] = set()
        for incoming in tuple(self._incoming):
            if incoming.source in late or not incoming.request.Test():
                late.add(incoming.source)
                continue
            self._incoming = [other for other in self._incoming if other is not incoming]
            if incoming.data.numel() == 0:
                self._departed.add(incoming.source)
            else:
                self._mailbox.append(self._parsed(incoming.source, incoming.data))

    def _packed(self, kind: str, tensor: Tensor, numbers: Numbers) -> Tensor:
        device = HOST_MEMORY if tensor.is_cpu else DEVICE_MEMORY
        form = self._forms.pack(kind, tensor.shape, tensor.dtype, device)
        head = _LENGTH.pack(len(form)) + NUMBERS.pack(*numbers) + form
        start = _padded(len(head))
        data = self._blocks.take(start + tensor.nbytes)
        data.numpy().data[: len(head)] = head
        data[start:].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return data

    def _parsed(self, source: int, data: Tensor) -> Arrival:
        view = data.numpy().data
        length = _LENGTH.unpack_from(view)[0] if len(view) > _START else 0
        form = self._forms.parse(bytes(view[_START : _START + length]), source)
        start = _padded(_START + length)
        if len(view) != start + form.num_bytes:
            raise ProtocolError(
                f"rank {source} sent {len(view) - start} bytes of data where its header says "
                f"{form.num_bytes}: check that all ranks run the same version of Ganglion"
            )
        tensor = data[start:].view(form.dtype).view(form.shape)
        if form.device == DEVICE_MEMORY:
            tensor = tensor.cuda()
        header = make_header(form, NUMBERS.unpack_from(view, _LENGTH.size))
        return Arrival(source, header, tensor)

    def _send(self, target: int, data: Tensor) -> None:
        try:
            request = self._comm.Isend([data.numpy(), MPI.BYTE], self._ranks.index(target), _TAG)
            if not request.Test():
                self._sends.append((target, request))
                self._progress.notify()
        except MPI.Exception as error:
            raise death_error(self.rank, target, str(error), "sent it a message") from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise CommError(f"rank {self.rank} uses a transport that it has closed: open another")

    def _has_news(self) -> bool:
        return bool(self._mailbox) or self._failure is not None or self._is_alone()

    def _is_alone(self) -> bool:
        return bool(self.peers) and len(self._departed) == len(self.peers) and not self._incoming


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
