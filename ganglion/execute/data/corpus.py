"""The files of a text source, and their contents as documents.

The default source is the standard library of the running Python.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from ganglion.errors import DataError

_PROBE_BYTES = 8192
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


def source_root(source: str) -> Path:
    """Return the folder that the names of a source's files are relative to."""
    if not source:
        return Path(sysconfig.get_path("stdlib"))
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(
            f'data.source = "{source}" does not exist: name a file or a folder of text, '
            f"or leave it empty for Python's own library"
        )
    return path if path.is_dir() else path.parent


def find_files(source: str) -> list[Path]:
    """Return the files of a source, sorted by relative name; refuse a source without a byte.

    `""`: every module of the running Python's standard library but its tests. A file: itself. A
    folder: the text files below it; names that begin with a dot and files with a NUL byte near
    their beginning are left out.
    """
    root = source_root(source)
    if not source:
        files = [path for path in _walk(root, _NOT_LIBRARY) if path.suffix == ".py"]
    elif Path(source).expanduser().is_dir():
        files = [path for path in _walk(root) if _is_text(path)]
    else:
        files = [Path(source).expanduser()]
    if not any(path.stat().st_size for path in files):
        raise DataError(
            f'data.source = "{source}" is empty: {len(files)} text files with 0 bytes in '
            f"{root}; name a source with text in it"
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_documents(files: Iterable[Path]) -> Iterator[bytes]:
    """Yield the contents of each file, in order."""
    for path in files:
        try:
            document = path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error
        yield document


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield regular files below a folder; hidden names and the names in `left_out` are skipped."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_wanted(name, left_out)]
        paths = (Path(folder, name) for name in names if _is_wanted(name, left_out))
        yield from (path for path in paths if path.is_file())


def _is_wanted(name: str, left_out: frozenset[str]) -> bool:
    return not name.startswith(".") and name not in left_out


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_PROBE_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} of data.source cannot be read: {error.strerror}; "
        f"make it readable or move it elsewhere"
    )
