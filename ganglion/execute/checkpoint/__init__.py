"""Checkpoints: tensors in safetensors shards, everything else in JSON, nothing in pickles.

Modules that move tensors are loaded on first use: torch's checkpoint library takes a second to
import, which finding the newest checkpoint should not cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.execute.checkpoint.layout import (
    checkpoint_name,
    latest_checkpoint,
    list_checkpoints,
    prune,
    remove_incomplete,
    step_of,
)
from ganglion.execute.checkpoint.state import JSON, SavedState
from ganglion.lazy import lazy_names

if TYPE_CHECKING:
    from ganglion.execute.checkpoint.differences import (
        Difference,
        TrainingNumbers,
        compare_folders,
        formula,
    )
    from ganglion.execute.checkpoint.optimizer import (
        changed_settings,
        check_state_shapes,
        optimizer_pieces,
        optimizer_record,
        optimizer_scalars,
        optimizer_tensors,
        prepare_optimizers,
    )
    from ganglion.execute.checkpoint.pieces import Piece, RankPlacements, Saveable, gather_whole
    from ganglion.execute.checkpoint.reading import load, load_exported, read_specs, read_state
    from ganglion.execute.checkpoint.storage import TensorSpec
    from ganglion.execute.checkpoint.writing import Ranks, save

__all__ = [
    "JSON",
    "Difference",
    "Piece",
    "RankPlacements",
    "Ranks",
    "Saveable",
    "SavedState",
    "TensorSpec",
    "TrainingNumbers",
    "changed_settings",
    "check_state_shapes",
    "checkpoint_name",
    "compare_folders",
    "formula",
    "gather_whole",
    "latest_checkpoint",
    "list_checkpoints",
    "load",
    "load_exported",
    "optimizer_pieces",
    "optimizer_record",
    "optimizer_scalars",
    "optimizer_tensors",
    "prepare_optimizers",
    "prune",
    "read_specs",
    "read_state",
    "remove_incomplete",
    "save",
    "step_of",
]

_MODULES = {
    "differences": ("Difference", "TrainingNumbers", "compare_folders", "formula"),
    "optimizer": (
        "changed_settings",
        "check_state_shapes",
        "optimizer_pieces",
        "optimizer_record",
        "optimizer_scalars",
        "optimizer_tensors",
        "prepare_optimizers",
    ),
    "pieces": ("Piece", "RankPlacements", "Saveable", "gather_whole"),
    "reading": ("load", "load_exported", "read_specs", "read_state"),
    "storage": ("TensorSpec",),
    "writing": ("Ranks", "save"),
}

__getattr__ = lazy_names(
    __name__, {name: module for module, names in _MODULES.items() for name in names}
)
