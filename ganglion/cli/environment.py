"""The surroundings of a process of the command line: its cores, its cache, its log streams."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TextIO

LOG_LEVELS = ("debug", "info", "warning", "error")


def usable_cores() -> int:
    """Return the number of cores this process may run on, or of all cores if that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_rank(num_local_ranks: int) -> int:
    """Return an equal share of the usable cores, at least one."""
    return max(1, usable_cores() // num_local_ranks)


def cache_folder() -> Path:
    """Return the user's cache folder for Ganglion (XDG_CACHE_HOME is honoured)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ganglion"


def log_to_screen(level: str, stream: TextIO | None = None) -> None:
    """Show records of at least `level` on `stream`, by default on standard error."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    # On the handler, not on the logger: the rank's file takes more than the screen.
    handler.setLevel(level.upper())
    logging.getLogger().addHandler(handler)
    logging.getLogger("ganglion").setLevel(min(logging.INFO, handler.level))


def log_to_file(path: Path) -> None:
    """Append this rank's records of at least INFO to its own file, with times."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("ganglion").addHandler(handler)
