"""Snapshots of a served centre, from which a server that replaces a lost one starts.

A snapshot is one safetensors file, written beside the old one and moved into its place, so a
server that is killed while it writes leaves the old one whole. Exchanges after the last snapshot
are lost with the server; the workers keep their weights and continue.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ganglion.errors import CheckpointError, ConfigError

_CENTER = "center"


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The file of snapshots, and the number of exchanges between two."""

    path: Path
    every: int = 100

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every = {self.every}: a snapshot needs at least 1 exchange")

    def is_due(self, version: int) -> bool:
        """Return whether the centre of this version is to be saved."""
        return version % self.every == 0

    def save(self, center: Tensor, version: int, state: Mapping[str, Tensor]) -> None:
        """Write a snapshot in place of the last."""
        partial = self.path.with_name(self.path.name + ".partial")
        tensors = {_CENTER: center, **state}
        save_file(tensors, partial, metadata={"version": str(version)})
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(self.path)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The start of a new server: its centre and version, and the state of its rule."""

    center: Tensor
    version: int
    state: Mapping[str, Tensor]


def load_snapshot(path: Path) -> Snapshot:
    """Return the snapshot in a file; raise CheckpointError if it is not one."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            version = int((file.metadata() or {})["version"])
            return Snapshot(tensors.pop(_CENTER), version, tensors)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no snapshot of a centre ({error}): start the server with new weights, or "
            f"name the file that Snapshots wrote"
        ) from error
