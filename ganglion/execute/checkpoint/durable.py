"""Files that are on the disk, and known by checksum, when the call that wrote them returns."""

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
    """What a file must measure: its length and the CRC-32 of its bytes."""

    num_bytes: int
    crc32: int


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file from flat chunks of bytes, push it to the disk and return its record."""
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
    """Return the record of a file as it is now, reading all of it."""
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(num_bytes, crc32)


def sync_folder(path: Path) -> None:
    """Push the names in a folder to the disk: without this a rename may not survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal to `action` (a verb) `path` into a CheckpointError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot {action} {path}: {reason}{_remedy(error, path)}") from error


def _remedy(error: OSError, path: Path) -> str:
    if error.errno in _FULL:
        return (
            f" ({_free(path)} free there); free some space, lower checkpoint.keep, or set "
            f"output.dir to a folder on another disk"
        )
    return "; check that the folder exists and is yours to change, or set output.dir to another one"


def _free(path: Path) -> str:
    existing = next((folder for folder in path.parents if folder.exists()), Path())
    return format_bytes(shutil.disk_usage(existing).free)
