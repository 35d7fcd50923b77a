"""Data sets of tokens and generated images: shapes, determinism, and that they can be learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ganglion.errors import DataError
from ganglion.execute.data import GeneratedImages, MapDataset, Subset, SyntheticTokens, TokenWindows


def samples_of(dataset: MapDataset) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


def test_windows_cover_the_tokens_and_targets_follow_by_one() -> None:
    windows = TokenWindows(np.arange(11, dtype=np.uint16), seq_len=5)
    assert len(windows) == 2
    inputs, targets = zip(*samples_of(windows), strict=True)
    assert torch.cat(inputs).tolist() == list(range(10))
    assert torch.cat(targets).tolist() == list(range(1, 11))
    assert inputs[0].dtype == targets[0].dtype == torch.int64


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(6, 1), (10, 1), (11, 2), (12, 2)])
def test_last_window_needs_a_token_to_follow(num_tokens: int, num_windows: int) -> None:
    assert len(TokenWindows(np.zeros(num_tokens, np.uint8), seq_len=5)) == num_windows


def test_windows_read_from_a_mapped_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(bytes(range(250, 256)))
    tokens = np.memmap(tmp_path / "tokens", dtype=np.uint8, mode="r")
    inputs, targets = TokenWindows(tokens, seq_len=5)[0]
    assert inputs.tolist() == [250, 251, 252, 253, 254]
    assert targets.tolist() == [251, 252, 253, 254, 255]
    inputs.zero_()  # a sample is a copy: the file is read-only


def test_corpus_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.seq_len = 5 needs 6 tokens, .* has 5"):
        TokenWindows(np.zeros(5, np.uint8), seq_len=5)


@pytest.mark.parametrize("index", [-1, 2])
def test_index_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"sample {index} is outside a data set of 2"):
        TokenWindows(np.arange(11), seq_len=5)[index]


def test_synthetic_tokens_depend_on_seed_and_index_alone() -> None:
    first, again = (SyntheticTokens(100, 16, 50, seed=3) for _ in range(2))
    assert torch.equal(first[40][0], again[40][0])
    assert not torch.equal(first[40][0], first[41][0])
    assert not torch.equal(first[40][0], SyntheticTokens(100, 16, 50, seed=4)[40][0])
    inputs, targets = first[40]
    assert inputs.shape == targets.shape == (16,)
    assert torch.equal(inputs[1:], targets[:-1])
    assert len(first) == 100


@pytest.mark.parametrize("vocab_size", [1, 2, 12, 256])
def test_synthetic_tokens_follow_their_rule_nine_times_in_ten(vocab_size: int) -> None:
    dataset = SyntheticTokens(50, 64, vocab_size, seed=0)
    inputs, targets = (torch.stack(parts) for parts in zip(*samples_of(dataset), strict=True))
    assert int(inputs.min()) >= 0 and int(inputs.max()) < vocab_size
    predicted = (dataset.multiplier * inputs + dataset.increment) % vocab_size
    share = (predicted == targets).float().mean()
    expected = 1 - dataset.noise + dataset.noise / vocab_size
    assert share == pytest.approx(expected, abs=0.03)
    assert len(set(predicted.flatten().tolist())) == vocab_size


def test_synthetic_tokens_need_a_vocabulary() -> None:
    with pytest.raises(DataError, match=r"at least 1 token id, not 0: set model\.vocab_size"):
        SyntheticTokens(1, 1, 0, seed=0)


def test_generated_images_depend_on_seed_and_index_alone() -> None:
    first, again = (GeneratedImages(100, seed=3) for _ in range(2))
    image, label = first[7]
    assert image.shape == (1, 28, 28) and image.dtype == torch.float32
    assert label.shape == () and label.dtype == torch.int64
    assert float(image.min()) >= 0 and float(image.max()) <= 1
    assert torch.equal(image, again[7][0]) and torch.equal(label, again[7][1])
    assert not torch.equal(image, first[8][0])
    assert not torch.equal(image, GeneratedImages(100, seed=4)[7][0])


def test_generated_images_can_be_told_apart_by_class_means() -> None:
    images, labels = (
        torch.stack(part) for part in zip(*samples_of(GeneratedImages(600)), strict=True)
    )
    train, test = slice(0, 400), slice(400, 600)
    means = torch.stack([images[train][labels[train] == n].mean(0) for n in range(10)])
    distances = torch.cdist(images[test].flatten(1), means.flatten(1))
    accuracy = (distances.argmin(1) == labels[test]).float().mean()
    assert accuracy > 0.9


def test_generated_images_of_other_sizes() -> None:
    images = GeneratedImages(30, num_classes=3, image_size=12)
    assert images[0][0].shape == (1, 12, 12)
    assert {int(label) for _, label in samples_of(images)} == {0, 1, 2}


def test_subset_asks_for_plain_indices() -> None:
    class Recorder:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> object:
            assert type(index) is int
            return index * 100

    subset = Subset(Recorder(), np.array([7, 2]))
    assert len(subset) == 2
    assert samples_of(subset) == [700, 200]
