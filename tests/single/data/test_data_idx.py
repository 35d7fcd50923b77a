"""IDX files: every type, compressed or not, and every way they can be broken."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ganglion.errors import DataError
from ganglion.execute.data import idx
from ganglion.execute.data.datasets import IdxImages
from ganglion.execute.data.idx import find_idx_folder, find_idx_pair, read_idx

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array: npt.NDArray[Any]) -> bytes:
    header = struct.pack(">HBB", 0, CODES[array.dtype.str[1:]], array.ndim)
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return header + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_images(folder: Path, part: str, labels: list[int]) -> npt.NDArray[np.uint8]:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 4, 5)).astype(np.uint8)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
    numbers = np.array(labels, dtype=np.uint8)
    (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(numbers)))
    return images


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", CODES)
def test_every_type_reads_back(tmp_path: Path, dtype: str, compressed: bool) -> None:
    array = np.array([[1, 2, 3], [100, 5, 6]], dtype=dtype)
    content = idx_bytes(array)
    path = tmp_path / "any-name"
    path.write_bytes(gzip.compress(content) if compressed else content)
    result = read_idx(path)
    assert result.dtype == array.dtype
    assert result.dtype.isnative
    assert result.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file: it begins with ''"),
        (b"\x00\x00\x0a\x01\x00\x00\x00\x00", "is not an IDX file: it begins with '00 00 0a 01'"),
        (b"\x01\x00\x08\x01\x00\x00\x00\x00", "is not an IDX file"),
        (
            b"\x00\x00\x08\x03\x00\x00\x00\x00",
            "ends inside its header: 3 dims need 16 bytes, it has 8",
        ),
        (idx_bytes(np.ones((2, 3), "i2"))[:-1], r"hold 12 bytes of int16 .*\(2, 3\) but holds 11"),
        (idx_bytes(np.ones((2, 3), "i2")) + b"x", "but holds 13"),
        (gzip.compress(b"\0" * 1000)[:-9], "cannot be read"),
        (b"\x1f\x8b broken", "cannot be read"),
    ],
    ids=["empty", "type", "zeros", "header", "short", "long", "short gzip", "bad gzip"],
)
def test_broken_files_are_refused_with_path_and_numbers(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "broken-idx"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"broken-idx .*{message}"):
        read_idx(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing of data\.source cannot be read"):
        read_idx(tmp_path / "nothing")


def test_images_are_scaled_and_labelled(tmp_path: Path) -> None:
    pixels = write_images(tmp_path, "train", [3, 0, 7])
    pair = find_idx_pair(tmp_path, "train")
    assert pair is not None
    images = IdxImages(*pair)
    assert len(images) == 3
    assert images.num_classes == 8
    image, label = images[2]
    assert image.dtype == torch.float32 and image.shape == (1, 4, 5)
    assert torch.equal(image, torch.from_numpy(pixels[2:3]).float() / 255)
    assert label.dtype == torch.int64 and label.shape == () and int(label) == 7
    with pytest.raises(IndexError):
        images[3]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 4, 4), "f4"), np.zeros(2, "u1"), "holds float32 of shape"),
        (np.zeros((2, 16), "u1"), np.zeros(2, "u1"), r"shape \(2, 16\); images must be"),
        (np.zeros((2, 4, 4), "u1"), np.zeros(3, "u1"), r"holds 2 images, .*shape \(3,\)"),
        (np.zeros((0, 4, 4), "u1"), np.zeros(0, "u1"), "holds 0 images"),
        (np.zeros((1, 4, 4), "u1"), np.array([-1], "i1"), "holds the label -1"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(
    tmp_path: Path, images: npt.NDArray[Any], labels: npt.NDArray[Any], message: str
) -> None:
    (tmp_path / "images").write_bytes(idx_bytes(images))
    (tmp_path / "labels").write_bytes(idx_bytes(labels))
    with pytest.raises(DataError, match=message):
        IdxImages(tmp_path / "images", tmp_path / "labels")


def test_both_spellings_of_names_are_found(tmp_path: Path) -> None:
    write_images(tmp_path, "train", [0])
    (tmp_path / "train-images-idx3-ubyte").rename(tmp_path / "train-images.idx3-ubyte")
    pair = find_idx_pair(tmp_path, "train")
    assert pair is not None
    assert [path.name for path in pair] == ["train-images.idx3-ubyte", "train-labels-idx1-ubyte.gz"]
    assert find_idx_pair(tmp_path, "t10k") is None


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, "train", [0])
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="train-images-idx3-ubyte but not train-labels-idx1-ubyte"):
        find_idx_pair(tmp_path, "train")


def test_folders_are_found_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_idx_folder(str(tmp_path)) == tmp_path
    with pytest.raises(DataError, match=r"data\.source = .*nowhere.* is not a folder of IDX files"):
        find_idx_folder(str(tmp_path / "nowhere"))
    monkeypatch.setattr(idx, "FASHION_MNIST_FOLDER", tmp_path)
    assert find_idx_folder("fashion-mnist") == tmp_path
    monkeypatch.setattr(idx, "FASHION_MNIST_FOLDER", tmp_path / "nowhere")
    with pytest.raises(DataError, match="not there: apt install dataset-fashion-mnist"):
        find_idx_folder("fashion-mnist")
