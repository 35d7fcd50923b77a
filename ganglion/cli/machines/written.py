"""Where a cluster file may be written."""

from __future__ import annotations

from pathlib import Path

from ganglion.errors import ConfigError


def check_target(path: Path | None) -> None:
    """Raise ConfigError, before anything is measured, for a file that cannot be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(
            f"--write {path}: the folder {path.parent} does not exist: make it, or name another "
            f"file"
        )
