"""Folders of checkpoints and their manifests.

A checkpoint has its final name if, and only if, it is complete. Its manifest lists length and
checksum of every file, so that damage is found before anything is loaded.

step-00000020/              complete: chosen by `latest_checkpoint`
    manifest.json           length and CRC-32 of every other file
    state.json              step, plan, optimizer settings, extra state
    shards/rank-*.safetensors
    model.safetensors       the model alone, under its serial names
step-00000030.incomplete/   being written, or left by a save that died
step-00000020.replaced/     moved aside while a new save of the same step takes its name
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint.durable import (
    FileRecord,
    explained,
    measure,
    sync_folder,
    write_durably,
)

MANIFEST = "manifest.json"
STATE = "state.json"
SHARDS = "shards"
EXPORT = "model.safetensors"
INCOMPLETE = ".incomplete"
REPLACED = ".replaced"
MANIFEST_FORMAT = 1

_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step: `checkpoint_name(10) == 'step-00000010'`."""
    assert step >= 0, step
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    match = _NAME.fullmatch(path.name)
    assert match, f"{path} is not named like a checkpoint"
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder by step; none if there is no folder."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=step_of)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def previous_checkpoint(path: Path) -> Path | None:
    """Return the newest complete checkpoint beside `path` that is older than it, or None."""
    if not _NAME.fullmatch(path.name):
        return None
    older = [other for other in list_checkpoints(path.parent) if step_of(other) < step_of(path)]
    return next(reversed(older), None)


def incomplete(path: Path) -> Path:
    """Return the folder of a checkpoint while it is written."""
    return path.with_name(path.name + INCOMPLETE)


def remove_incomplete(folder: Path) -> None:
    """Remove the remains of interrupted saves; restore a replaced checkpoint without successor.

    Call it on one rank, and never during a save.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        final = path.with_name(path.stem)
        if not _NAME.fullmatch(final.name) or path.suffix not in (INCOMPLETE, REPLACED):
            continue
        with explained("clear away", path):
            if path.suffix == REPLACED and not final.exists():
                path.rename(final)
            else:
                shutil.rmtree(path)


def prune(folder: Path, keep: int, *, spare: Path | None = None) -> None:
    """Delete all but the `keep` newest complete checkpoints; `spare` is never deleted."""
    assert keep >= 1, keep
    for path in list_checkpoints(folder)[:-keep]:
        if path != spare:
            _remove(path)


def publish(unfinished: Path, final: Path) -> None:
    """Give a finished checkpoint its final name, then delete an older one of that name."""
    old = final.with_name(final.name + REPLACED)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        unfinished.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    sync_folder(final.parent)
    if old.exists():
        shutil.rmtree(old)


def _remove(path: Path) -> None:
    """Delete a checkpoint; a half-deleted one never has a final name."""
    doomed = incomplete(path)
    with explained("delete", path):
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Write the records of all other files, named relative to `folder`."""
    records = {
        name: {"bytes": record.num_bytes, "crc32": f"{record.crc32:08x}"}
        for name, record in sorted(files.items())
    }
    text = json.dumps({"format": MANIFEST_FORMAT, "files": records}, indent=2) + "\n"
    write_durably(folder / MANIFEST, [text.encode()])


def read_manifest(path: Path) -> dict[str, FileRecord]:
    """Return the records of a checkpoint's files, without checking the files."""
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
    """Refuse a file that is missing or has another length; its content is not read."""
    if not (path / name).is_file():
        raise damaged(path, f"{name} is missing")
    num_bytes = (path / name).stat().st_size
    if num_bytes != record.num_bytes:
        raise damaged(path, f"{name} has {num_bytes} bytes instead of {record.num_bytes}")


def check_content(path: Path, name: str, record: FileRecord) -> None:
    """Refuse a file that is missing or whose bytes have changed; all of it is read."""
    check_size(path, name, record)
    with explained("read", path / name):
        crc32 = measure(path / name).crc32
    if crc32 != record.crc32:
        raise damaged(path, f"{name} has CRC-32 {crc32:08x} instead of {record.crc32:08x}")


def shard_files(path: Path, files: Mapping[str, FileRecord]) -> list[Path]:
    """Return the listed shard files; refuse a folder with unlisted ones."""
    listed = [path / name for name in files if name.startswith(f"{SHARDS}/")]
    present = (path / SHARDS).iterdir() if (path / SHARDS).is_dir() else ()
    for other in sorted(set(present) - set(listed)):
        raise damaged(path, f"{SHARDS}/{other.name} is not listed in {MANIFEST}")
    return listed


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a damaged checkpoint, with the one to resume from instead."""
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
