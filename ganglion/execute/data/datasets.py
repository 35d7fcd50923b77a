"""Data sets: map-style, each sample a pair of tensors (input, target) that depends on its index.

Data sets keep no position or random state: any process and thread may read any sample.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ganglion.errors import DataError
from ganglion.execute.data.idx import read_idx
from ganglion.execute.data.sampler import Indices, mix_seed

Sample = tuple[Tensor, Tensor]


class MapDataset(Protocol):
    """A data set with a length, and (input, target) at any index below it."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return (input, target): tensors, arrays or numbers."""


class Subset(Dataset[Any]):
    """The samples of another data set at the given indices."""

    def __init__(self, dataset: MapDataset, indices: Indices) -> None:
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        """Return the other data set's sample."""
        return self._dataset[self.origin(index)]

    def origin(self, index: int) -> int:
        """Return the sample's index in the other data set, as the plain int users expect."""
        return int(self._indices[_checked(index, len(self))])


class TokenWindows(Dataset[Sample]):
    """Consecutive windows of a stream of ids; the target is the window shifted by one id."""

    def __init__(self, tokens: npt.NDArray[Any], seq_len: int) -> None:
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"data.seq_len = {seq_len} needs {seq_len + 1} tokens, but the source has "
                f"{len(tokens)}: choose a shorter seq_len or a larger data.source"
            )
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        """Return the number of samples."""
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> Sample:
        """Return (ids, the ids that follow them), both int64 of shape (seq_len,)."""
        start = _checked(index, len(self)) * self._seq_len
        window = np.array(self._tokens[start : start + self._seq_len + 1], dtype=np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


class SyntheticTokens(Dataset[Sample]):
    """Text without a corpus: each id determines the next one, except for one in ten.

    next = (multiplier * id + increment) mod vocab_size, so the entropy a model can reach is known.
    """

    noise = 0.1

    def __init__(self, num_samples: int, seq_len: int, vocab_size: int, seed: int) -> None:
        if vocab_size < 1:
            raise DataError(
                f"synthetic tokens need at least 1 token id, not {vocab_size}: set model.vocab_size"
            )
        self._num_samples = num_samples
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed
        rule = np.random.default_rng(mix_seed(seed))
        self.increment = int(rule.integers(1, max(vocab_size, 2)))
        self.multiplier = int(rule.integers(1, max(vocab_size, 2)))
        while math.gcd(self.multiplier, vocab_size) > 1:
            self.multiplier -= 1

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return (ids, the ids that follow them), both int64 of shape (seq_len,)."""
        random = np.random.default_rng(mix_seed(self._seed, _checked(index, len(self))))
        surprises = random.integers(0, self._vocab_size, self._seq_len + 1).tolist()
        is_surprise = (random.random(self._seq_len + 1) < self.noise).tolist()
        ids = [surprises[0]]
        for surprise, surprised in zip(surprises[1:], is_surprise[1:], strict=True):
            follower = (self.multiplier * ids[-1] + self.increment) % self._vocab_size
            ids.append(surprise if surprised else follower)
        window = torch.tensor(ids, dtype=torch.int64)
        return window[:-1].clone(), window[1:].clone()


class IdxImages(Dataset[Sample]):
    """Grey images and their classes from two IDX files: float32 (1, H, W) in [0, 1], and int64."""

    def __init__(self, images_path: Path, labels_path: Path) -> None:
        self._images = read_idx(images_path)
        self._labels = read_idx(labels_path).astype(np.int64)
        if self._images.ndim != 3 or self._images.dtype != np.uint8:
            raise DataError(
                f"{images_path} holds {self._images.dtype} of shape {self._images.shape}; "
                f"images must be uint8 of shape (number, height, width)"
            )
        if self._labels.shape != self._images.shape[:1] or not len(self._labels):
            raise DataError(
                f"{images_path} holds {len(self._images)} images, but the labels of "
                f"{labels_path} have shape {self._labels.shape}: each image needs one label"
            )
        if self._labels.min() < 0:
            raise DataError(
                f"{labels_path} holds the label {self._labels.min()}; they count from 0"
            )

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(self._labels.max()) + 1

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        """Return (image, class)."""
        pixels = torch.from_numpy(self._images[_checked(index, len(self))]).unsqueeze(0)
        return pixels.to(torch.float32) / 255, torch.tensor(int(self._labels[index]))


class GeneratedImages(Dataset[Sample]):
    """Images without files: a noisy bar near the middle whose direction is the class."""

    bar_width = 0.15
    noise = 0.2

    def __init__(
        self, num_samples: int, num_classes: int = 10, image_size: int = 28, seed: int = 0
    ) -> None:
        self._num_samples = num_samples
        self.num_classes = num_classes
        self._seed = seed
        spots = np.linspace(-1, 1, image_size, dtype=np.float32)
        self._rows, self._columns = np.meshgrid(spots, spots, indexing="ij")

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return (image, class)."""
        random = np.random.default_rng(mix_seed(self._seed, _checked(index, len(self))))
        label = int(random.integers(self.num_classes))
        angle = math.pi * label / self.num_classes
        shift = random.uniform(-0.2, 0.2)
        distance = self._columns * math.sin(angle) - self._rows * math.cos(angle) - shift
        bar = np.exp(-((distance / self.bar_width) ** 2))
        noise = self.noise * random.standard_normal(bar.shape, dtype=np.float32)
        image = np.clip(bar + noise, 0, 1).astype(np.float32)
        return torch.from_numpy(image).unsqueeze(0), torch.tensor(label)


def _checked(index: int, length: int) -> int:
    # Python's own iteration over a data set ends at the first IndexError.
    if not 0 <= index < length:
        raise IndexError(f"sample {index} is outside a data set of {length}")
    return index
