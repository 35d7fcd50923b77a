"""One connection to a rank of the same host: frames on a Unix stream socket, payloads beside it.

    MESSAGE  header, payload      a small payload, or any payload without shared memory
    SLOT     header               the payload lies in a slot of a segment
    SEGMENT  (with a descriptor)  a new segment, before the first SLOT that uses it
    RETIRE                        the sender will not use a segment again
    BYE                           the last frame: the sender closed in good order

Writing never waits: bytes that the socket does not take are kept and written later, in order.
"""

from __future__ import annotations

import array
import ctypes
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from ganglion.errors import CommError, ProtocolError
from ganglion.execute.comm.message import (
    MAX_FORM_BYTES,
    Arrival,
    Form,
    Forms,
    Header,
    Numbers,
    make_header,
    plain_copy,
)
from ganglion.execute.comm.shm.memory import MakeSegment, Pool, Window

logger = logging.getLogger(__name__)

MESSAGE, SLOT, SEGMENT, RETIRE, BYE = range(1, 6)
_MAGIC = 0x6C47
# magic, type, slot or number of slots, segment, bytes of the form or of a slot, and the message's
# step, stage, microbatch, version and flow
_FRAME = struct.Struct("<HBBIQqqqqq")
_FRAME_BYTES = _FRAME.size
_INBOX_BYTES = 64 << 10
_ROOM_FOR_DESCRIPTOR = socket.CMSG_SPACE(array.array("i").itemsize)
# Plain ints: the enum's own operators take a microsecond.
_WRITE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_READ_FLAGS = int(socket.MSG_DONTWAIT)
_TRUNCATED = int(socket.MSG_CTRUNC)

Buffer = bytes | memoryview | ctypes.Array[ctypes.c_char]


class Broken(Exception):
    """The connection broke; the text is the reason."""


class MessageLink:
    """Both directions of one connection; received messages are appended to `arrivals`."""

    def __init__(
        self,
        rank: int,
        peer: int,
        connection: socket.socket,
        arrivals: deque[Arrival],
        inline_bytes: int,
        make_segment: MakeSegment,
    ) -> None:
        """Take over a connected socket; payloads above `inline_bytes` go to shared memory."""
        self.peer = peer
        self.departed = False
        self.descriptor = connection.fileno()
        self._rank = rank
        self._connection = connection
        self._arrivals = arrivals
        self._inline_bytes = inline_bytes
        self._pool = Pool(make_segment)
        self._has_warned = False
        self._outbox: deque[tuple[memoryview, int]] = deque()  # what to write, descriptor or -1
        self._forms = Forms()
        inbox = (ctypes.c_ubyte * _INBOX_BYTES)()
        self._address = ctypes.addressof(inbox)
        self._inbox = memoryview(inbox).cast("B")
        self._num_read = 0
        self._windows: dict[int, Window] = {}
        self._descriptors: deque[int] = deque()
        self._partial: _Partial | None = None

    @property
    def backlogged(self) -> bool:
        """Whether there are bytes that the socket has not taken yet."""
        return bool(self._outbox)

    def send(self, kind: str, tensor: Tensor, num_bytes: int, numbers: Numbers) -> None:
        """Send a copy of the tensor; raise Broken if the peer is gone."""
        form = self._forms.pack(kind, tensor.shape, tensor.dtype)
        if num_bytes > self._inline_bytes and self._send_slot(form, tensor, num_bytes, numbers):
            return
        frame = _FRAME.pack(_MAGIC, MESSAGE, 0, 0, len(form), *numbers) + form
        if num_bytes == 0:
            self._write([frame])
            return
        source = tensor if _is_plain(tensor) else plain_copy(tensor)
        payload = (ctypes.c_char * num_bytes).from_address(source.data_ptr())
        self._write([frame, payload])

    def send_bye(self) -> None:
        """Send the last frame."""
        self._write([_control(BYE)])

    def write_backlog(self) -> None:
        """Write the backlog, as far as the socket takes it."""
        while self._outbox:
            data, descriptor = self._outbox[0]
            num_sent = self._send_now([data], descriptor)
            if num_sent < len(data):
                self._outbox[0] = (data[num_sent:], -1 if num_sent else descriptor)
                return
            self._outbox.popleft()

    def read(self) -> bool:
        """Read once and deliver complete messages; return whether there was anything to read.

        Raise Broken at the end of the stream, ProtocolError for garbage.
        """
        partial = self._partial
        target = self._inbox[self._num_read :] if partial is None else partial.rest
        try:
            num_bytes, ancillary, flags, _ = self._connection.recvmsg_into(
                [target], _ROOM_FOR_DESCRIPTOR, _READ_FLAGS
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise Broken(error.strerror) from error
        if ancillary or flags & _TRUNCATED:
            self._keep_descriptors(ancillary, flags)
        if num_bytes == 0:
            raise Broken("end of stream")
        if partial is None:
            self._num_read += num_bytes
            self._parse()
        elif partial.add(num_bytes):
            self._partial = None
            self._arrivals.append(Arrival(self.peer, partial.header, partial.tensor))
        return True

    def close(self) -> None:
        """Close the connection and release all memory that no arrival lies in."""
        self._connection.close()
        _close_all(self._descriptors)
        _close_all(descriptor for _, descriptor in self._outbox)
        self._descriptors.clear()
        self._outbox.clear()
        self._windows.clear()
        self._pool.close()

    def _send_slot(self, form: bytes, tensor: Tensor, num_bytes: int, numbers: Numbers) -> bool:
        """Send through shared memory; return False, with one warning, if there is none."""
        try:
            segment, index = self._pool.take(num_bytes)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "rank %d cannot share %d bytes of memory with rank %d (%s): large messages go "
                    "through the socket and take longer; raise the limit on memory or open files",
                    *(self._rank, num_bytes, self.peer, error),
                )
            return False
        _copy_to(segment.slot_address(index), tensor, num_bytes)
        frame = _FRAME.pack(_MAGIC, SLOT, index, segment.number, len(form), *numbers) + form
        if segment.descriptor < 0:
            self._write([frame])
        else:
            new = _control(SEGMENT, segment.num_slots, segment.number, segment.slot_bytes)
            retired = [_control(RETIRE, 0, number) for number in self._pool.retire_idle()]
            self._write([b"".join([new, frame, *retired])], segment.release())
        return True

    def _write(self, parts: list[Buffer], descriptor: int = -1) -> None:
        """Write the parts or keep them for later; own the descriptor from now on."""
        num_sent = 0
        try:
            if self._outbox:
                self.write_backlog()  # little may fit, but only a write shows that the peer is dead
            if not self._outbox:
                num_sent = self._send_now(parts, descriptor)
        except Broken:
            _close_all([descriptor])
            raise
        if num_sent < sum(map(len, parts)):
            rest = memoryview(b"".join(parts))[num_sent:]
            self._outbox.append((rest, -1 if num_sent else descriptor))

    def _send_now(self, parts: list[Buffer], descriptor: int) -> int:
        """Return how many bytes the socket took; the descriptor goes with the first of them."""
        packed = array.array("i", [descriptor])
        rights = [] if descriptor < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
        try:
            num_sent = self._connection.sendmsg(parts, rights, _WRITE_FLAGS)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Broken(error.strerror) from error
        _close_all([descriptor])
        return num_sent

    def _parse(self) -> None:
        """Parse every complete frame, and move the rest to the front."""
        start, end = 0, self._num_read
        while end - start >= _FRAME_BYTES:
            frame = _FRAME.unpack_from(self._inbox, start)
            magic, kind, index, number, size = frame[:5]
            body = start + _FRAME_BYTES
            if magic != _MAGIC or (kind <= SLOT and size > MAX_FORM_BYTES):
                raise self._garbage(start)
            if kind > SLOT:
                self._take_control(start, kind, index, number, size)
                start = body
            elif body + size > end:
                break
            else:
                form = self._forms.parse(self._inbox[body : body + size].tobytes(), self.peer)
                header = make_header(form, frame[5:])
                start = body + size
                if kind == MESSAGE:
                    start += self._take_inline(form, header, start)
                else:
                    tensor = self._borrow(form, number, index)
                    self._arrivals.append(Arrival(self.peer, header, tensor))
        if 0 < start < end:
            self._inbox[: end - start] = self._inbox[start:end]
        self._num_read = end - start

    def _take_inline(self, form: Form, header: Header, start: int) -> int:
        """Copy the payload that begins at `start`; return how many bytes of it have arrived."""
        num_arrived = min(form.num_bytes, self._num_read - start)
        tensor = torch.empty(form.shape, dtype=form.dtype)
        ctypes.memmove(tensor.data_ptr(), self._address + start, num_arrived)
        if num_arrived < form.num_bytes:
            self._partial = _Partial(header, tensor, num_arrived)
        else:
            self._arrivals.append(Arrival(self.peer, header, tensor))
        return num_arrived

    def _borrow(self, form: Form, number: int, index: int) -> Tensor:
        """Return the tensor that lies in a slot, without a copy."""
        window = self._windows.get(number)
        fits = window is not None and index < window.num_slots
        if window is None or not fits or not 0 < form.num_bytes <= window.slot_bytes:
            raise ProtocolError(
                f"rank {self.peer} sent rank {self._rank} {form.num_bytes} bytes of {form.kind!r} "
                f"in slot {index} of segment {number}, which does not exist or is too small"
            )
        memory = window.lend(index, form.num_bytes)
        return torch.frombuffer(memory, dtype=form.dtype).view(form.shape)

    def _take_control(self, start: int, kind: int, index: int, number: int, size: int) -> None:
        """Handle a frame that is not a message."""
        if kind == SEGMENT and self._descriptors and number not in self._windows:
            self._windows[number] = self._map_window(self._descriptors.popleft(), size, index)
        elif kind == RETIRE and number in self._windows:
            del self._windows[number]
        elif kind == BYE:
            self.departed = True
        else:
            raise self._garbage(start)

    def _map_window(self, descriptor: int, slot_bytes: int, num_slots: int) -> Window:
        try:
            return Window(descriptor, slot_bytes, num_slots)
        except (OSError, ValueError, OverflowError) as error:
            raise CommError(
                f"rank {self._rank} cannot map {num_slots} x {slot_bytes} bytes that rank "
                f"{self.peer} shares with it ({error}): raise the limit on memory, or use the "
                f"torch transport"
            ) from error

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", data))
        if flags & socket.MSG_CTRUNC:
            raise CommError(
                f"rank {self._rank} cannot take the shared memory of rank {self.peer}: too many "
                f"open files; raise the limit on them (ulimit -n)"
            )

    def _garbage(self, start: int) -> ProtocolError:
        shown = self._inbox[start : start + 16].hex(" ")
        return ProtocolError(
            f"rank {self.peer} sent rank {self._rank} bytes that are not a message ({shown} ...): "
            f"check that all ranks run the same version of Ganglion"
        )


class _Partial:
    """A payload that is still arriving through the socket, straight into its tensor."""

    def __init__(self, header: Header, tensor: Tensor, num_arrived: int) -> None:
        self.header = header
        self.tensor = tensor
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        self.rest = memoryview(memory).cast("B")[num_arrived:]

    def add(self, num_bytes: int) -> bool:
        """Count arrived bytes; return whether the payload is complete."""
        self.rest = self.rest[num_bytes:]
        return not self.rest


def _control(kind: int, index: int = 0, number: int = 0, size: int = 0) -> bytes:
    return _FRAME.pack(_MAGIC, kind, index, number, size, -1, -1, -1, -1, -1)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's memory holds its contents in order."""
    return tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def _copy_to(address: int, tensor: Tensor, num_bytes: int) -> None:
    """Copy the contents to `address`, in order, without the GIL."""
    if _is_plain(tensor):
        # 1.5 times as fast as Tensor.copy_ for tensors larger than the caches.
        ctypes.memmove(address, tensor.data_ptr(), num_bytes)
        return
    memory = (ctypes.c_char * num_bytes).from_address(address)
    torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
