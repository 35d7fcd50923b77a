"""Memory that two ranks share: segments cut into slots, one message in each.

The sender makes a segment as a memfd (it has no name, so nothing is left behind by a kill), hands
its descriptor over once and closes it. Sender and receiver then talk through the memory alone:

    segment:  [ 1 0 1 0 ... | slot 0 | slot 1 | slot 2 | slot 3 ... ]
                ^ one byte a slot: the sender sets it to take the slot, the receiver clears it
                  when the last tensor that lies in the slot is gone

So a slot comes back without a system call, from whichever thread drops the tensor, and without
waking the sender, which looks for a cleared byte when it needs a slot.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable

_PAGE = mmap.PAGESIZE
_FREE, _TAKEN = b"\0", b"\1"
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAX_SLOTS = 32
_SHARED_SEGMENT_BYTES = 2 << 20  # up to here small slots share a segment
_KEEP_IDLE_BYTES = 64 << 20


def slot_size(num_bytes: int) -> int:
    """Round up to a size class: four a doubling, so at most a quarter is wasted."""
    step = max(_PAGE, 1 << max(0, (num_bytes - 1).bit_length() - 3))
    return -(-num_bytes // step) * step


def map_shared(descriptor: int, num_bytes: int) -> tuple[memoryview, int]:
    """Map a file; return the memory, which unmaps itself when nobody refers to it, and where it is.

    Python's own mmap keeps a duplicate of the descriptor: a thousand kept arrivals would use up the
    process's open files.
    """
    address = _LIBC.mmap(
        None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
    )
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    unmap = weakref.finalize(memory, _LIBC.munmap, address, num_bytes)
    unmap.atexit = False  # tensors may still lie there
    return memoryview(memory).cast("B"), address


class Segment:
    """Shared memory of `num_slots` equal slots, as its maker and sender sees it."""

    def __init__(self, number: int, slot_bytes: int, num_slots: int) -> None:
        """Make the memory; raises OSError where the system has none to give."""
        self.number = number
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.num_bytes = _PAGE + slot_bytes * num_slots
        self.last_use = 0
        self.descriptor = os.memfd_create("ganglion-mail", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.num_bytes)
            # The receiver maps this: shrinking it would kill the receiver with SIGBUS.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory, self._address = map_shared(self.descriptor, self.num_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._flags = memory[:num_slots]

    def release(self) -> int:
        """Return the descriptor, for the caller to pass on and close: the mapping needs none."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def take(self) -> int:
        """Take a free slot and return its index, or -1."""
        index = self._flags.tobytes().find(_FREE)
        if index >= 0:
            self._flags[index] = 1
        return index

    def idle(self) -> bool:
        """Return whether every slot is free."""
        return self._flags.tobytes().find(_TAKEN) < 0

    def address(self, index: int) -> int:
        """Return where slot `index` starts in this process."""
        return self._address + _PAGE + index * self.slot_bytes

    def close(self) -> None:
        """Unmap the memory; receivers keep theirs."""
        if self.descriptor >= 0:
            os.close(self.release())
        self._flags.release()


MakeSegment = Callable[[int, int, int], Segment]


class Pool:
    """The segments one sender has made for one receiver, grown on demand."""

    def __init__(self, make: MakeSegment = Segment) -> None:
        """Start empty; `make` is a parameter so that tests can run out of memory."""
        self._make = make
        self._segments: dict[int, list[Segment]] = {}
        self._num_made = 0
        self._clock = 0
        self._peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """How much is mapped, free or taken."""
        return sum(segment.num_bytes for segment in self._all())

    def take(self, num_bytes: int) -> tuple[Segment, int]:
        """Take a slot that holds `num_bytes`; raises OSError if a new segment cannot be made.

        A segment whose descriptor is still open has to be announced to the receiver.
        """
        self._clock += 1
        slot_bytes = slot_size(num_bytes)
        for segment in self._segments.get(slot_bytes, ()):
            index = segment.take()
            if index >= 0:
                segment.last_use = self._clock
                return segment, index
        return self._grow(slot_bytes)

    def retire_idle(self) -> list[int]:
        """Unmap what was idle longest, beyond what was ever in flight; return the numbers."""
        idle = [segment for segment in self._all() if segment.idle()]
        excess = sum(segment.num_bytes for segment in idle) - max(
            _KEEP_IDLE_BYTES, self._peak_bytes
        )
        retired = []
        for segment in sorted(idle, key=lambda segment: segment.last_use):
            if excess <= 0:
                break
            excess -= segment.num_bytes
            self._forget(segment)
            retired.append(segment.number)
        return retired

    def close(self) -> None:
        """Unmap everything."""
        for segment in self._all():
            segment.close()
        self._segments.clear()

    def _grow(self, slot_bytes: int) -> tuple[Segment, int]:
        num_slots = max(1, min(_MAX_SLOTS, _SHARED_SEGMENT_BYTES // slot_bytes))
        segment = self._make(self._num_made, slot_bytes, num_slots)
        self._num_made += 1
        # The newest goes first: the older ones were just found to be full.
        self._segments.setdefault(slot_bytes, []).insert(0, segment)
        segment.last_use = self._clock
        index = segment.take()
        busy = sum(segment.num_bytes for segment in self._all() if not segment.idle())
        self._peak_bytes = max(self._peak_bytes, busy)
        return segment, index

    def _all(self) -> list[Segment]:
        return [segment for same in self._segments.values() for segment in same]

    def _forget(self, segment: Segment) -> None:
        self._segments[segment.slot_bytes].remove(segment)
        segment.close()


class _Loan(weakref.ref[memoryview]):
    """Watches the memory of one arrival and frees its slot when the last tensor is gone."""

    __slots__ = ("flags", "index")
    flags: memoryview
    index: int


def _give_back(loan: weakref.ref[memoryview]) -> None:
    assert isinstance(loan, _Loan)
    loan.flags[loan.index] = 0


class Window:
    """A sender's segment as its receiver sees it."""

    def __init__(self, descriptor: int, slot_bytes: int, num_slots: int) -> None:
        """Map the segment and close the descriptor; raises OSError if either cannot be done."""
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        num_bytes = _PAGE + slot_bytes * num_slots
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                raise OSError("the segment is shorter than announced")
            self._memory, _ = map_shared(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self._loans: list[_Loan | None] = [None] * num_slots

    def lend(self, index: int, num_bytes: int) -> memoryview:
        """Return the slot's memory; the slot goes back when nothing refers to it any more.

        The mapping lives as long as any such memory does, whatever becomes of this object.
        """
        start = _PAGE + index * self.slot_bytes
        memory = self._memory[start : start + num_bytes]
        loan = _Loan(memory, _give_back)
        loan.flags, loan.index = self._memory, index
        self._loans[index] = loan
        return memory
