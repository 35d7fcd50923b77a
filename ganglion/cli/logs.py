"""Where log lines go: the screen from the asked level up, a file per rank from INFO up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TextIO

LOG_LEVELS = ("debug", "info", "warning", "error")


def log_to_screen(level: str, stream: TextIO | None = None) -> None:
    """Show records of at least `level`, on the error output if no stream is given."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    # On the handler, not on the logger: the rank's file takes more than the screen.
    handler.setLevel(level.upper())
    logging.getLogger().addHandler(handler)
    logging.getLogger("ganglion").setLevel(min(logging.INFO, handler.level))


def log_to_file(path: Path) -> None:
    """Write this rank's log to its own file, with times; a resumed run appends."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("ganglion").addHandler(handler)
