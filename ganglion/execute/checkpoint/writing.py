"""Saving: every rank writes its shard, then rank 0 completes the folder and gives it its name.

    all ranks   meet at a barrier: from here on a failure of one reaches all
    rank 0      step-N.incomplete/
    all ranks       shards/rank-R.safetensors, shards/rank-R-1.safetensors if a name has two boxes
    rank 0          state.json, model.safetensors, manifest.json, all on the disk
    rank 0      rename to step-N/, drop the oldest

Only the rename makes a complete checkpoint, so a crash before it loses this save and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ganglion.execute.checkpoint.collective import save_shards
from ganglion.execute.checkpoint.durable import FileRecord, explained, sync_folder, write_durably
from ganglion.execute.checkpoint.layout import (
    EXPORT,
    SHARDS,
    STATE,
    checkpoint_name,
    incomplete,
    prune,
    publish,
    write_manifest,
)
from ganglion.execute.checkpoint.pieces import Saveable
from ganglion.execute.checkpoint.state import SavedState
from ganglion.execute.checkpoint.storage import ShardWriter, write_tensors


class Ranks(Protocol):
    """The part of a world that saving needs."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def num_ranks(self) -> int:
        """The number of processes that save together."""

    def barrier(self) -> None:
        """Return when every rank has arrived; raise when one is late past the deadline."""


def save(
    folder: Path,
    tensors: Mapping[str, Saveable],
    state: SavedState,
    ranks: Ranks,
    *,
    process_group: dist.ProcessGroup | None = None,
    keep: int,
    export: Mapping[str, Tensor] | None = None,
) -> Path:
    """Save a checkpoint below `folder` and return its path; collective over all ranks.

    A name that several ranks hold is one tensor: each box of it is written once. `state`, `keep`
    and `export` (whole tensors for `model.safetensors`) count on rank 0; others may pass None for
    `export`. A failure raises CheckpointError on every rank and leaves earlier checkpoints as they
    were. Without `process_group` this process is alone.
    """
    assert process_group is not None or ranks.num_ranks == 1, "several ranks need a process group"
    final = folder / checkpoint_name(state.step)
    unfinished = incomplete(final)

    def commit(shards: Mapping[str, FileRecord]) -> None:
        records = {f"{SHARDS}/{name}": record for name, record in shards.items()}
        with explained("write", unfinished):
            _complete(unfinished, records, state, export)
            publish(unfinished, final)
        prune(folder, keep, spare=final)

    def begin() -> None:
        with explained("make", unfinished):
            if unfinished.exists():
                shutil.rmtree(unfinished)
            (unfinished / SHARDS).mkdir(parents=True)

    writer = ShardWriter(unfinished / SHARDS, begin=begin, commit=commit)
    ranks.barrier()
    try:
        save_shards(tensors, writer, process_group)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # a full disk must not stay full
        raise
    return final


def _complete(
    unfinished: Path,
    records: dict[str, FileRecord],
    state: SavedState,
    export: Mapping[str, Tensor] | None,
) -> None:
    """Write everything but the shards, the manifest last, and fsync the folder."""
    records[STATE] = write_durably(unfinished / STATE, [state.to_json().encode()])
    if export is not None:
        records[EXPORT] = write_tensors(unfinished / EXPORT, export, {"format": "pt"})
    write_manifest(unfinished, records)
    sync_folder(unfinished)
