"""Tiers: where optimizer state lives when it is not on the device, and regions of bytes on them.

Threads move a region piece by piece, in whole pages; a checkpoint sees it as one tensor, which it
saves and loads like any other. Both see the same bytes, but never at the same time: checkpoints are
taken between updates.

The host tier is memory of the machine, pinned for a GPU so that copies run beside it. For a model
on the CPU it is the same memory: allowed, for tests and comparisons, but it frees nothing.

The disk tier is a scratch file, read and written past the page cache. The file is unlinked once it
is open, so a killed run leaves nothing behind. Its space is reserved with the region: a full disk
is an error before training, not in the middle of it. Moves use direct input and output where the
file system has it, so nothing stays in the page cache and a copy is saved. Elsewhere the kernel is
asked to drop what was moved; pages not yet written go one move later. (The resident memory of a
process never counts the cache behind pread and pwrite; a cgroup does.) `tensor()` maps the same
file: its pages count as resident until `release`. The kernel keeps both views consistent.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ganglion.errors import ConfigError, OffloadError
from ganglion.units import MIB

logger = logging.getLogger(__name__)
PAGE_BYTES = 4096
_HOST = torch.device("cpu")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Region(Protocol):
    """A range of bytes of a tier; starts and sizes of moves are multiples of a page."""

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""

    def read_into(self, start: int, out: Tensor) -> None:
        """Fill a flat tensor of bytes from the region, beginning at byte `start`."""

    def write_from(self, start: int, source: Tensor) -> None:
        """Copy a flat tensor of bytes into the region, beginning at byte `start`."""

    def tensor(self) -> Tensor:
        """Return the whole as a flat tensor of bytes, a view of the tier."""

    def release(self) -> None:
        """Free the memory that `tensor` took; what was written through it stays."""


class Tier(Protocol):
    """Storage for regions."""

    @property
    def num_bytes(self) -> int:
        """How many bytes are reserved."""

    def reserve(self, num_bytes: int) -> Region:
        """Return a new region; raise OffloadError if there is no room for it."""

    def describe(self) -> str:
        """Return what and where it is, for the log."""

    def close(self) -> None:
        """Free everything."""


def page_buffer(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Return a flat tensor of bytes that begins on a page, as direct input and output need."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    room = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=pinned)
    start = -room.data_ptr() % PAGE_BYTES
    return room[start : start + num_bytes]


class HostTier:
    """Pinned memory if the device is a GPU, plain memory if it is not."""

    def __init__(self, device: torch.device) -> None:
        """Hold nothing yet."""
        self._pins = device.type == "cuda"
        self._regions: list[HostRegion] = []
        if device.type == "cpu":
            logger.warning(
                'memory.offload = "host" frees nothing here: the model computes on the CPU, in '
                'the same memory; "disk" would free it'
            )

    @property
    def num_bytes(self) -> int:
        """How many bytes are reserved."""
        return sum(region.num_bytes for region in self._regions)

    def reserve(self, num_bytes: int) -> HostRegion:
        """Return a new region, zeros as in a new file."""
        region = HostRegion(page_buffer(num_bytes, _HOST, pinned=self._pins).zero_())
        self._regions.append(region)
        return region

    def describe(self) -> str:
        """Return what it is, for the log."""
        return "pinned host memory" if self._pins else "host memory"

    def close(self) -> None:
        """Free the memory."""
        self._regions.clear()


class HostRegion:
    """A flat tensor of bytes."""

    def __init__(self, data: Tensor) -> None:
        """Hold `data`."""
        self._data = data
        self.num_bytes = data.numel()

    def read_into(self, start: int, out: Tensor) -> None:
        """Copy to the device, on the stream of the caller."""
        out.copy_(self._data[start : start + out.numel()], non_blocking=True)

    def write_from(self, start: int, source: Tensor) -> None:
        """Copy from the device, on the stream of the caller."""
        self._data[start : start + source.numel()].copy_(source, non_blocking=True)

    def tensor(self) -> Tensor:
        """Return the memory itself."""
        return self._data

    def release(self) -> None:
        """Do nothing: the memory is the tier."""


class DiskTier:
    """An unlinked file in a folder."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Create the empty file; buffers of a GPU pass through pinned memory."""
        self.folder = folder
        self._device = device
        self._size = 0
        self._staging = threading.local()
        with self._explained(0):
            folder.mkdir(parents=True, exist_ok=True)
            self.file, path = tempfile.mkstemp(prefix="ganglion-offload-", dir=folder)
        try:
            self.direct = _open_direct(path)
        finally:
            Path(path).unlink()

    @property
    def num_bytes(self) -> int:
        """How many bytes are reserved."""
        return self._size

    def reserve(self, num_bytes: int) -> DiskRegion:
        """Return a new region at the end of the file."""
        start = self._size
        # Mappings begin at multiples of this, which is a page or more.
        whole = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if whole:
            with self._explained(whole):
                os.posix_fallocate(self.file, start, whole)
        self._size += whole
        return DiskRegion(self, start, num_bytes)

    def describe(self) -> str:
        """Return where it is and how it is moved, for the log."""
        how = "buffered" if self.direct is None else "direct"
        return f"disk, {how}, a scratch file in {self.folder}"

    def close(self) -> None:
        """Close the file; its space is free once no tensor of it is in use."""
        for file in (self.file, self.direct):
            if file is not None and file >= 0:
                os.close(file)
        self.file, self.direct = -1, None

    def move(self, buffer: Tensor, position: int, *, writes: bool) -> None:
        """Read or write all of a buffer at a byte of the file."""
        with self._explained(buffer.numel()):
            host = buffer if buffer.device.type == "cpu" else self._staged(buffer.numel())
            if writes and host is not buffer:
                host.copy_(buffer)
            self._move_all(host.numpy().data, position, writes=writes)
            if not writes and host is not buffer:
                buffer.copy_(host)

    def _move_all(self, view: memoryview, position: int, *, writes: bool) -> None:
        file = self.file if self.direct is None else self.direct
        at = 0
        while at < len(view):
            part = [view[at:]]
            moved = (os.pwritev if writes else os.preadv)(file, part, position + at)
            if moved == 0:
                raise OSError(errno.EIO, f"the file ends at byte {position + at}")
            at += moved
        if self.direct is None:
            self.forget(position, len(view))

    def forget(self, position: int, num_bytes: int) -> None:
        """Ask the kernel to write out dirty pages and to drop the others from its cache."""
        if hasattr(os, "posix_fadvise"):
            # With the move before: its pages may be written by now.
            before = max(0, position - num_bytes)
            end = position + num_bytes
            os.posix_fadvise(self.file, before, end - before, os.POSIX_FADV_DONTNEED)

    def _staged(self, num_bytes: int) -> Tensor:
        """Return pinned memory of the calling thread, the same at every call."""
        room: Tensor | None = getattr(self._staging, "room", None)
        if room is None or room.numel() < num_bytes:
            room = page_buffer(num_bytes, torch.device("cpu"), pinned=True)
            self._staging.room = room
        return room[:num_bytes]

    @contextmanager
    def _explained(self, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise OffloadError(
                    f"memory.offload_dir = {str(self.folder)!r} failed: {error}; choose a folder "
                    f"on a disk that works, or set memory.offload to another tier"
                ) from error
            raise OffloadError(
                f"no room for optimizer state in memory.offload_dir = {str(self.folder)!r}: "
                f"{num_bytes / MIB:.1f} MiB more were needed beside {self._size / MIB:.1f} MiB, "
                f"{_free_bytes(self.folder) / MIB:.1f} MiB are free ({error.strerror}); set it to "
                f"a folder on a larger disk"
            ) from error


class DiskRegion:
    """A range of the file."""

    def __init__(self, tier: DiskTier, start: int, num_bytes: int) -> None:
        """Begin at byte `start` of the file."""
        self._tier = tier
        self._start = start
        self.num_bytes = num_bytes
        self._map: mmap.mmap | None = None

    def read_into(self, start: int, out: Tensor) -> None:
        """Fill a flat tensor of bytes."""
        self._tier.move(out, self._position(start, out), writes=False)

    def write_from(self, start: int, source: Tensor) -> None:
        """Copy a flat tensor of bytes to the disk."""
        self._tier.move(source, self._position(start, source), writes=True)

    def tensor(self) -> Tensor:
        """Return the whole, mapped."""
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if self._map is None:
            self._map = mmap.mmap(self._tier.file, self.num_bytes, offset=self._start)
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Unmap the pages in use, and let the cache drop them."""
        if self._map is None:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            # A shared mapping loses nothing: changed pages stay in the cache.
            self._map.madvise(mmap.MADV_DONTNEED)
        self._tier.forget(self._start, self.num_bytes)

    def _position(self, start: int, buffer: Tensor) -> int:
        assert buffer.dtype == torch.uint8 and buffer.dim() == 1, "regions are moved as bytes"
        assert start % PAGE_BYTES == 0 and start + buffer.numel() <= self.num_bytes
        return self._start + start


def _open_direct(path: str) -> int | None:
    """Open a file for direct input and output, if its file system can."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None  # as on tmpfs of older kernels


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def open_tier(name: str, folder: Path, device: torch.device) -> Tier:
    """Return a new tier; its files go into `folder`, its moves to and from `device`."""
    if name == "disk":
        return DiskTier(folder, device)
    if name == "host":
        return HostTier(device)
    raise ConfigError(f'memory.offload = {name!r} is no tier: choose "none", "host" or "disk"')
