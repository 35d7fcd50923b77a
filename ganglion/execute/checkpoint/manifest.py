"""The manifest: what every file of a checkpoint must measure, so that damage is found first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint.durable import FileRecord, explained, measure, write_durably
from ganglion.execute.checkpoint.layout import MANIFEST, SHARDS, previous_checkpoint

MANIFEST_FORMAT = 1


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Write the records of all other files, named relative to `folder`."""
    records = {
        name: {"bytes": record.num_bytes, "crc32": f"{record.crc32:08x}"}
        for name, record in sorted(files.items())
    }
    text = json.dumps({"format": MANIFEST_FORMAT, "files": records}, indent=2) + "\n"
    write_durably(folder / MANIFEST, [text.encode()])


def read_manifest(path: Path) -> dict[str, FileRecord]:
    """Read the records of a checkpoint's files; they are not compared with the files yet."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path}; check the path")
    if not (path / MANIFEST).is_file():
        raise damaged(path, f"{MANIFEST} is missing")
    with explained("read", path / MANIFEST):
        data = (path / MANIFEST).read_bytes()
    try:
        content = json.loads(data)
        if content["format"] == MANIFEST_FORMAT:
            return {name: _record(entry) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"{MANIFEST} cannot be read ({error!r})") from error
    raise CheckpointError(
        f"{path / MANIFEST} has format {content['format']!r}, but this version reads format "
        f"{MANIFEST_FORMAT}: load it with the version that saved it"
    )


def check_size(path: Path, name: str, record: FileRecord) -> None:
    """Refuse a file that is missing or has another length; reads nothing."""
    if not (path / name).is_file():
        raise damaged(path, f"{name} is missing")
    num_bytes = (path / name).stat().st_size
    if num_bytes != record.num_bytes:
        raise damaged(path, f"{name} has {num_bytes} bytes instead of {record.num_bytes}")


def check_content(path: Path, name: str, record: FileRecord) -> None:
    """Refuse a file that is missing or whose bytes have changed; reads all of it."""
    check_size(path, name, record)
    with explained("read", path / name):
        crc32 = measure(path / name).crc32
    if crc32 != record.crc32:
        raise damaged(path, f"{name} has CRC-32 {crc32:08x} instead of {record.crc32:08x}")


def shard_files(path: Path, files: Mapping[str, FileRecord]) -> list[Path]:
    """Return the listed shard files; refuse a folder with others, whose origin is unknown."""
    listed = [path / name for name in files if name.startswith(f"{SHARDS}/")]
    present = (path / SHARDS).iterdir() if (path / SHARDS).is_dir() else ()
    for other in sorted(set(present) - set(listed)):
        raise damaged(path, f"{SHARDS}/{other.name} is not listed in {MANIFEST}")
    return listed


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a checkpoint that cannot be trusted, with what is left to resume."""
    previous = previous_checkpoint(path)
    remedy = (
        f"delete that folder to resume from {previous.name}"
        if previous
        else "delete that folder to start again: there is no earlier checkpoint beside it"
    )
    return CheckpointError(f"checkpoint {path} is damaged: {what}; {remedy}")


def _record(entry: Mapping[str, object]) -> FileRecord:
    num_bytes, crc32 = entry["bytes"], entry["crc32"]
    if type(num_bytes) is not int or type(crc32) is not str:
        raise TypeError(f"bytes {num_bytes!r}, crc32 {crc32!r}")
    return FileRecord(num_bytes, int(crc32, 16))
