"""Names and folders: a checkpoint has its final name if, and only if, it is whole.

step-00000020/              whole: chosen by `latest_checkpoint`
    manifest.json           length and CRC-32 of every other file
    state.json              step, plan, optimizer settings, extra state
    shards/rank-*.safetensors
    model.safetensors       the model alone, under its serial names
step-00000030.incomplete/   being written, or left by a save that died
step-00000020.replaced/     moved aside while a new save of the same step takes its name
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ganglion.execute.checkpoint.durable import explained, sync_folder

MANIFEST = "manifest.json"
STATE = "state.json"
SHARDS = "shards"
EXPORT = "model.safetensors"
INCOMPLETE = ".incomplete"
REPLACED = ".replaced"

_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step: `checkpoint_name(10) == 'step-00000010'`."""
    assert step >= 0, step
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint folder's name tells."""
    match = _NAME.fullmatch(path.name)
    assert match, f"{path} is not named like a checkpoint"
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints of a folder by rising step; none if there is no folder."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=step_of)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the whole checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def previous_checkpoint(path: Path) -> Path | None:
    """Return the newest whole checkpoint beside `path` that is older than it, or None."""
    if not _NAME.fullmatch(path.name):
        return None
    older = [other for other in list_checkpoints(path.parent) if step_of(other) < step_of(path)]
    return next(reversed(older), None)


def incomplete(path: Path) -> Path:
    """Return where a checkpoint is while it is written."""
    return path.with_name(path.name + INCOMPLETE)


def remove_incomplete(folder: Path) -> None:
    """Clear away what interrupted saves left; bring back a replaced checkpoint without successor.

    For one rank, and never while a save is under way.
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
    """Delete all but the `keep` newest whole checkpoints; `spare` is never deleted."""
    assert keep >= 1, keep
    for path in list_checkpoints(folder)[:-keep]:
        if path != spare:
            _remove(path)


def publish(unfinished: Path, final: Path) -> None:
    """Give a finished checkpoint its final name; one of that name goes only when it is replaced."""
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
    """Delete a checkpoint so that no half of it ever has a final name."""
    doomed = incomplete(path)
    with explained("delete", path):
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
