"""Memory that ranks of one host share: memfds, mapped by every process that gets a descriptor.

A memfd has no name in any file system, so a killed rank leaves nothing behind. A segment for
messages is cut into slots, one message in each. Its sender hands the descriptor over once; after
that, sender and receiver talk through the memory alone:

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

import torch
from torch import Tensor

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
    """Map a file; return the memory, which is unmapped with its last reference, and its address.

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


def map_tensor(descriptor: int, num_bytes: int) -> Tensor:
    """Map a file; return it as bytes, unmapped when no tensor uses them any more."""
    return torch.frombuffer(map_shared(descriptor, num_bytes)[0], dtype=torch.uint8)


class Segment:
    """Shared memory made by this process; `memory` is all of it."""

    def __init__(self, num_bytes: int, name: str = "ganglion", *, reserves: bool = True) -> None:
        """Make and map the memory; raise OSError if the system has none to give.

        With `reserves` its pages are reserved now: a lack of memory is an error here, not a SIGBUS
        later.
        """
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if reserves:
                os.posix_fallocate(self.descriptor, 0, num_bytes)
            else:
                os.ftruncate(self.descriptor, num_bytes)
            # Others map this: shrinking it would kill them with SIGBUS.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.memory, self.address = map_shared(self.descriptor, num_bytes)
        except BaseException:
            os.close(self.release())
            raise

    def release(self) -> int:
        """Return the descriptor, for the caller to pass on and close: the mapping needs none."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as a process has it mapped."""
        if self.descriptor >= 0:
            os.close(self.release())


class Arena:
    """This member's allocated segments, found again by the address of a tensor inside."""

    def __init__(self) -> None:
        self._segments: dict[int, tuple[int, Segment]] = {}

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a new segment of its own; raise OSError if there is no memory."""
        segment = Segment(num_elements * dtype.itemsize)
        self._segments[segment.address] = (len(self._segments), segment)
        return torch.frombuffer(segment.memory, dtype=dtype)

    def find(self, tensor: Tensor) -> tuple[int, Segment, int] | None:
        """Return (number, segment, offset in bytes) of an allocated tensor or a view of one."""
        address = tensor.untyped_storage().data_ptr()
        found = self._segments.get(address)
        return found and (*found, tensor.data_ptr() - address)

    def close(self) -> None:
        """Forget all segments; tensors inside keep their memory."""
        for _, segment in self._segments.values():
            segment.close()
        self._segments.clear()


class SlotSegment(Segment):
    """Shared memory of `num_slots` equal slots, as its maker and sender sees it."""

    def __init__(self, number: int, slot_bytes: int, num_slots: int) -> None:
        """Make the memory; raise OSError if the system has none to give."""
        super().__init__(_PAGE + slot_bytes * num_slots, "ganglion-mail", reserves=False)
        self.number = number
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.last_use = 0
        self._flags = self.memory[:num_slots]

    def take(self) -> int:
        """Take a free slot and return its index, or -1."""
        index = self._flags.tobytes().find(_FREE)
        if index >= 0:
            self._flags[index] = 1
        return index

    def idle(self) -> bool:
        """Return whether every slot is free."""
        return self._flags.tobytes().find(_TAKEN) < 0

    def slot_address(self, index: int) -> int:
        """Return the address of slot `index` in this process."""
        return self.address + _PAGE + index * self.slot_bytes

    def close(self) -> None:
        """Unmap the memory; receivers keep theirs."""
        super().close()
        self._flags.release()
        self.memory.release()


MakeSegment = Callable[[int, int, int], SlotSegment]


class Pool:
    """The segments one sender has made for one receiver, grown on demand."""

    def __init__(self, make: MakeSegment = SlotSegment) -> None:
        self._make = make
        self._segments: dict[int, list[SlotSegment]] = {}
        self._num_made = 0
        self._clock = 0
        self._peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The number of mapped bytes, free or taken."""
        return sum(segment.num_bytes for segment in self._all())

    def take(self, num_bytes: int) -> tuple[SlotSegment, int]:
        """Take a slot that holds `num_bytes`; raise OSError if a new segment cannot be made.

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
        """Unmap the longest idle segments beyond the peak in flight; return their numbers."""
        idle = [segment for segment in self._all() if segment.idle()]
        kept_bytes = max(_KEEP_IDLE_BYTES, self._peak_bytes)
        excess = sum(segment.num_bytes for segment in idle) - kept_bytes
        retired = []
        for segment in sorted(idle, key=lambda segment: segment.last_use):
            if excess <= 0:
                break
            excess -= segment.num_bytes
            self._segments[segment.slot_bytes].remove(segment)
            segment.close()
            retired.append(segment.number)
        return retired

    def close(self) -> None:
        """Unmap everything."""
        for segment in self._all():
            segment.close()
        self._segments.clear()

    def _grow(self, slot_bytes: int) -> tuple[SlotSegment, int]:
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

    def _all(self) -> list[SlotSegment]:
        return [segment for same in self._segments.values() for segment in same]


class _Loan(weakref.ref[memoryview]):
    """Watches the memory of one arrival and frees its slot when the last tensor is gone."""

    __slots__ = ("flags", "index")
    flags: memoryview
    index: int


def _free_slot(loan: weakref.ref[memoryview]) -> None:
    assert isinstance(loan, _Loan)
    loan.flags[loan.index] = 0


class Window:
    """A sender's segment as its receiver sees it."""

    def __init__(self, descriptor: int, slot_bytes: int, num_slots: int) -> None:
        """Map the segment and close the descriptor; raise OSError if that fails."""
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
        """Return the memory of a slot, which is free again when nothing refers to it any more.

        The mapping lives as long as any such memory, also after this object is gone.
        """
        start = _PAGE + index * self.slot_bytes
        memory = self._memory[start : start + num_bytes]
        loan = _Loan(memory, _free_slot)
        loan.flags, loan.index = self._memory, index
        self._loans[index] = loan
        return memory
