"""Partial files: a file is written under a name of its own and renamed when it is whole."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def partial_file(folder: Path) -> Iterator[Path]:
    """Give an unused hidden name in `folder`; what was not renamed is removed at the end."""
    path = folder / f".partial-{uuid.uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
