"""IDX files: the format of MNIST and its relatives, read and checked byte for byte.

    0  0  dtype  num_dims  |  num_dims sizes, 4 bytes each  |  the entries; all big-endian

https://yann.lecun.com/exdb/mnist describes it. Files may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ganglion.errors import DataError

FASHION_MNIST = "fashion-mnist"
# Where Debian's package dataset-fashion-mnist puts its four files.
FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_GZIP_MAGIC = b"\x1f\x8b"
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> npt.NDArray[Any]:
    """Return the array of an IDX file in the byte order of this machine."""
    content = _read_bytes(path)
    dtype, sizes = _read_header(content, path)
    start = 4 + 4 * len(sizes)
    expected_bytes = math.prod(sizes) * dtype.itemsize
    if len(content) - start != expected_bytes:
        raise DataError(
            f"{path} should hold {expected_bytes} bytes of {dtype.name} entries for its shape "
            f"{sizes} but holds {len(content) - start}: get the file again"
        )
    entries = np.frombuffer(content, dtype=dtype, offset=start).reshape(sizes)
    return entries.astype(dtype.newbyteorder("="))


def find_idx_folder(source: str) -> Path:
    """Return the folder of a `data.source` of images."""
    if source == FASHION_MNIST:
        if not FASHION_MNIST_FOLDER.is_dir():
            raise DataError(
                f'data.source = "{FASHION_MNIST}" needs {FASHION_MNIST_FOLDER}, which is not '
                f"there: apt install dataset-fashion-mnist"
            )
        return FASHION_MNIST_FOLDER
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(
            f'data.source = "{source}" is not a folder of IDX files; name one, or use '
            f'"{FASHION_MNIST}" or "generated"'
        )
    return folder


def find_idx_pair(folder: Path, part: str) -> tuple[Path, Path] | None:
    """Return the (images, labels) files of `train` or `t10k`; None if neither is there."""
    images = _find_file(folder, f"{part}-images", "idx3-ubyte")
    labels = _find_file(folder, f"{part}-labels", "idx1-ubyte")
    if images and labels:
        return images, labels
    if images or labels:
        missing = f"{part}-labels-idx1-ubyte" if images else f"{part}-images-idx3-ubyte"
        raise DataError(
            f"data.source: {folder} has {(images or labels)} but not {missing}: add the file"
        )
    return None


def _find_file(folder: Path, stem: str, suffix: str) -> Path | None:
    names = (f"{stem}{joint}{suffix}{ending}" for joint in "-." for ending in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} of data.source cannot be read: {error}; get the file again"
        ) from error


def _read_header(content: bytes, path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        raise DataError(
            f"{path} is not an IDX file: it begins with {content[:4].hex(' ')!r}, not with "
            f"00 00, one of {[f'{code:02x}' for code in _DTYPES]} and the number of dims"
        )
    num_dims = content[3]
    if len(content) < 4 + 4 * num_dims:
        raise DataError(
            f"{path} ends inside its header: {num_dims} dims need {4 + 4 * num_dims} bytes, "
            f"it has {len(content)}: get the file again"
        )
    return np.dtype(_DTYPES[content[2]]), struct.unpack_from(f">{num_dims}I", content, 4)
