"""Load a checkpoint: all ranks check files and names first, before any tensor changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint.collective import gather, load_shards
from ganglion.execute.checkpoint.durable import explained
from ganglion.execute.checkpoint.layout import (
    EXPORT,
    STATE,
    check_content,
    check_size,
    read_manifest,
    shard_files,
)
from ganglion.execute.checkpoint.pieces import Saveable
from ganglion.execute.checkpoint.state import SavedState
from ganglion.execute.checkpoint.storage import ShardReader, TensorSpec

Specs = Mapping[str, TensorSpec]
_NAMED = 3


def load(
    path: Path,
    tensors: Mapping[str, Saveable],
    *,
    process_group: dist.ProcessGroup | None = None,
    leaving: tuple[str, ...] = (),
) -> SavedState:
    """Fill `tensors` in place from a checkpoint and return the rest of it; collective.

    The ranks together must hold exactly the saved names, each with its saved whole shape and
    dtype; the cut into pieces may differ. Saved names that begin with one of `leaving` may be
    missing. Raise CheckpointError on every rank, before any tensor changes, if a file is missing or
    altered or the names, shapes or dtypes differ.
    """
    wanted = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    content, problem = _open(path, process_group)
    reports = gather((problem, wanted), process_group)
    for found, _ in reports:
        if found:
            raise CheckpointError(found)
    assert content is not None
    reader, state = content
    needed = {n: spec for n, spec in reader.specs.items() if not n.startswith(leaving)}
    _check_same_model(path, needed, [specs for _, specs in reports])
    load_shards(tensors, reader, process_group)
    return state


def read_state(path: Path) -> SavedState:
    """Return a checkpoint's state without its tensors; refuse an altered file."""
    _check_listed(path, STATE)
    with explained("read", path / STATE):
        return SavedState.from_json((path / STATE).read_text(encoding="utf-8"), str(path / STATE))


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return name, whole shape and dtype of every saved tensor, reading headers only."""
    files = read_manifest(path)
    shards = shard_files(path, files)
    for shard in shards:
        name = shard.relative_to(path).as_posix()
        check_size(path, name, files[name])
    return ShardReader(shards).specs


def load_exported(path: Path) -> dict[str, Tensor]:
    """Return the model alone, under its serial names; refuse an altered file."""
    _check_listed(path, EXPORT)
    return load_file(path / EXPORT)


def _check_listed(path: Path, name: str) -> None:
    files = read_manifest(path)
    if name not in files:
        raise CheckpointError(
            f"checkpoint {path} holds no {name}: it was saved without one; use another checkpoint"
        )
    check_content(path, name, files[name])


def _open(
    path: Path, process_group: dist.ProcessGroup | None
) -> tuple[tuple[ShardReader, SavedState] | None, str | None]:
    """Return the opened checkpoint, or its damage; the ranks share the checking.

    Damage is returned, not raised, because it is exchanged with the other ranks.
    """
    rank = 0 if process_group is None else dist.get_rank(process_group)
    num_ranks = 1 if process_group is None else dist.get_world_size(process_group)
    try:
        files = read_manifest(path)
        for name, record in files.items():
            check_size(path, name, record)
        for name in sorted(files)[rank::num_ranks]:
            check_content(path, name, files[name])
        return (ShardReader(shard_files(path, files)), read_state(path)), None
    except CheckpointError as error:
        return None, str(error)


def _check_same_model(path: Path, saved: Specs, held: Sequence[Specs]) -> None:
    known = set().union(*held)
    findings = [
        _finding("it has no", sorted(known - set(saved))),
        _finding("it has also", sorted(set(saved) - known)),
        _finding("it differs in", _altered(saved, held)),
    ]
    if any(findings):
        raise CheckpointError(
            f"the model differs from the one in {path}: {'; '.join(filter(None, findings))}; "
            f"resume with the run file that saved it, or set output.dir to a new folder"
        )


def _altered(saved: Specs, held: Sequence[Specs]) -> list[str]:
    texts = {
        f"{name} (saved {_text(saved[name])}, here {_text(spec)})"
        for specs in held
        for name, spec in specs.items()
        if name in saved and saved[name] != spec
    }
    return sorted(texts)


def _finding(what: str, items: list[str]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return f"{what} {', '.join(items[:_NAMED])}{more}" if items else ""


def _text(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
