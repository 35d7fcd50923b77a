"""Saved state: tensors in safetensors shards, everything else in JSON, nothing in pickles."""

from ganglion.checkpoint.layout import (
    checkpoint_name,
    latest_checkpoint,
    list_checkpoints,
    prune,
    remove_incomplete,
    step_of,
)
from ganglion.checkpoint.load import load, load_exported, read_specs, read_state
from ganglion.checkpoint.optimizer import (
    changed_settings,
    optimizer_record,
    optimizer_scalars,
    optimizer_settings,
    optimizer_tensors,
    prepare_optimizers,
)
from ganglion.checkpoint.save import Ranks, save
from ganglion.checkpoint.state import JSON, SavedState
from ganglion.checkpoint.storage import TensorSpec

__all__ = [
    "JSON",
    "Ranks",
    "SavedState",
    "TensorSpec",
    "changed_settings",
    "checkpoint_name",
    "latest_checkpoint",
    "list_checkpoints",
    "load",
    "load_exported",
    "optimizer_record",
    "optimizer_scalars",
    "optimizer_settings",
    "optimizer_tensors",
    "prepare_optimizers",
    "prune",
    "read_specs",
    "read_state",
    "remove_incomplete",
    "save",
    "step_of",
]
