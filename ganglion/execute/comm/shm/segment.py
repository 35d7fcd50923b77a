"""Memory that members of a group share: a memfd, mapped by everybody who is given its descriptor.

A memfd has no name in any file system, so nothing is left behind when its holders are killed.
Its pages are reserved when it is made: a lack of memory is an error here, not a SIGBUS later.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


class Segment:
    """Shared memory made by this process; `memory` is all of it, as bytes."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve `num_bytes`; raises OSError if they cannot be had."""
        self.descriptor = os.memfd_create("ganglion", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            self.memory = map_segment(self.descriptor, num_bytes)
        except BaseException:
            self.close()
            raise
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Give up the descriptor; the memory lives as long as somebody has it mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def map_segment(descriptor: int, num_bytes: int) -> Tensor:
    """Return the memory behind `descriptor` as bytes, unmapped when no tensor uses it any more."""
    # Through the descriptor's link torch maps it without keeping a descriptor open, which Python's
    # own mmap does.
    return torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8
    )


class Arena:
    """This member's allocated segments, found again by the address of a tensor inside."""

    def __init__(self) -> None:
        """Start with none."""
        self._segments: dict[int, tuple[int, Segment]] = {}

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a new segment of its own; raises OSError if there is no memory."""
        segment = Segment(num_elements * dtype.itemsize)
        address = segment.memory.untyped_storage().data_ptr()
        self._segments[address] = (len(self._segments), segment)
        return segment.memory.view(dtype)

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
