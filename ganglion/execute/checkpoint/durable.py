"""Write files to the disk with fsync and checksum, and explain errors of the file system."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ganglion.errors import CheckpointError
from ganglion.units import MIB, format_bytes

_READ_BYTES = 4 * MIB
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The length of a file and the CRC-32 of its bytes."""

    num_bytes: int
    crc32: int


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file from flat chunks of bytes, fsync it and return its record."""
    num_bytes = crc32 = 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(num_bytes, crc32)


def measure(path: Path) -> FileRecord:
    """Return the record of a file, reading all of it."""
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(num_bytes, crc32)


def sync_folder(path: Path) -> None:
    """Fsync a folder: without this a rename may not survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into a CheckpointError: cannot `action` (a verb) `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot {action} {path}: {reason}{_remedy(error, path)}") from error


def _remedy(error: OSError, path: Path) -> str:
    if error.errno in _FULL:
        existing = next((folder for folder in path.parents if folder.exists()), Path())
        free = format_bytes(shutil.disk_usage(existing).free)
        return (
            f" ({free} free there); free some space, lower checkpoint.keep, or set output.dir to a "
            f"folder on another disk"
        )
    return "; check that the folder exists and is yours to change, or set output.dir to another one"
