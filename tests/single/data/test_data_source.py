"""Data sources: what each kind of [data] section opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ganglion.errors import DataError
from ganglion.execute.data import DataSource, open_dataset, open_images, open_synthetic, open_text
from ganglion.execute.data import datasets as data_sets


def first_inputs(dataset: Any) -> set[float]:
    return {float(dataset[index][0].flatten()[0]) for index in range(len(dataset))}


def test_text_opens_as_disjoint_windows(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)) + b"\n")
    source = open_text(str(path), "bytes", 4096, 2, 0.1, 0, tmp_path / "cache")
    assert source.num_classes == 256
    assert source.input_shape == (2,)
    assert source.tokens_per_sample == 2
    assert source.tokenizer is not None and source.tokenizer.name == "bytes"
    assert source.held_out is not None
    assert len(source.train) == 90 and len(source.held_out) == 10
    train, held_out = first_inputs(source.train), first_inputs(source.held_out)
    assert train.isdisjoint(held_out)
    assert train | held_out == set(range(0, 200, 2))


def test_text_of_the_standard_library_opens(tmp_path: Path) -> None:
    source = open_text("", "bytes", 4096, 128, 0.02, 0, tmp_path)
    assert len(source.train) > 1000
    inputs, _ = source.train[0]
    assert inputs.shape == (128,)


def test_text_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(DataError, match=r"data\.seq_len = 64 needs 65 tokens, .* has 5"):
        open_text(str(tmp_path / "text"), "bytes", 4096, 64, 0.1, 0, tmp_path / "cache")


def test_nothing_is_held_out_without_a_fraction() -> None:
    assert open_synthetic(8, 16, 0.0, 0).held_out is None


def test_synthetic_tokens_open() -> None:
    source = open_synthetic(8, 16, 0.25, 0)
    assert (source.num_classes, source.input_shape, source.tokens_per_sample) == (16, (8,), 8)
    assert source.tokenizer is None
    assert source.held_out is not None
    assert len(source.train) == 3 * len(source.held_out)


@pytest.mark.parametrize("name", ["", "generated"])
def test_generated_images_open(name: str) -> None:
    source = open_images(name, 0.1, 0)
    assert (source.num_classes, source.input_shape) == (10, (1, 28, 28))
    assert source.tokens_per_sample == 1
    assert source.held_out is not None
    assert len(source.train) == 9 * len(source.held_out)


def write_idx_folder(folder: Path, part: str, labels: list[int]) -> None:
    images = bytes([0, 0, 8, 3, 0, 0, 0, len(labels), 0, 0, 0, 2, 0, 0, 0, 2])
    pixels = b"".join(bytes([number] * 4) for number in range(len(labels)))
    (folder / f"{part}-images-idx3-ubyte").write_bytes(images + pixels)
    header = bytes([0, 0, 8, 1, 0, 0, 0, len(labels)])
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(labels))


def test_idx_folder_opens_with_its_own_held_out_files(tmp_path: Path) -> None:
    write_idx_folder(tmp_path, "train", [0, 1, 2, 1])
    write_idx_folder(tmp_path, "t10k", [0, 4])
    source = open_images(str(tmp_path), 0.5, 0)
    assert source.held_out is not None
    assert len(source.train) == 4 and len(source.held_out) == 2
    assert source.num_classes == 5
    assert source.input_shape == (1, 2, 2)


def test_idx_folder_without_test_files_is_split(tmp_path: Path) -> None:
    write_idx_folder(tmp_path, "train", [0, 1, 2, 1])
    source = open_images(str(tmp_path), 0.5, 0)
    assert source.held_out is not None
    train, held_out = first_inputs(source.train), first_inputs(source.held_out)
    assert len(train) == len(held_out) == 2 and train.isdisjoint(held_out)


def test_idx_folder_without_training_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source = .* has no train-images-idx3-ubyte"):
        open_images(str(tmp_path), 0.1, 0)


def test_any_map_style_data_set_opens() -> None:
    dataset = TensorDataset(torch.arange(60.0).reshape(20, 3), torch.zeros(20))
    source = open_dataset(dataset, 0.1, 0)
    assert source.input_shape == (3,)
    assert source.num_classes == 0
    assert source.held_out is not None
    assert len(source.train) == 18 and len(source.held_out) == 2


def test_a_data_set_may_say_its_classes() -> None:
    source = open_dataset(data_sets.GeneratedImages(10, num_classes=7), 0.0, 0)
    assert isinstance(source, DataSource)
    assert source.num_classes == 7


def test_a_data_set_of_arrays_and_numbers_opens() -> None:
    source = open_dataset([(np.zeros((2, 3)), 1)] * 4, 0.0, 0)
    assert source.input_shape == (2, 3)


def test_data_sets_that_cannot_be_indexed_or_paired_are_refused() -> None:
    with pytest.raises(DataError, match="is a generator without __len__"):
        open_dataset(cast(Any, (number for number in range(3))), 0.1, 0)
    with pytest.raises(DataError, match="has 0 samples"):
        open_dataset([], 0.1, 0)
    with pytest.raises(DataError, match=r"sample 0 of data\.source is a int, not a pair"):
        open_dataset([1, 2], 0.0, 0)
