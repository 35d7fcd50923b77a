"""The samples of each step, computed from the seed and the step alone.

There is no state, so a run resumes at any step without replaying earlier ones, and every layout of
one global batch size gets the same global batches:

    sample number   k = step * global_batch_size + i
    epoch           k // num_samples      (a batch may cross epochs)
    sample          permute(k % num_samples), with a new permutation in every epoch

The permutation is a Feistel network: a few rounds of hashing that can be evaluated at any single
index. It permutes a power of four; an image outside the wanted range is permuted again until it
falls inside ("cycle walking"), which keeps the map one-to-one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ganglion.decide.topology import Coordinates, Mesh
from ganglion.errors import DataError, LayoutError

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_WORD_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 6
# Four values are too few for the rounds to tell seeds apart; sixteen are enough.
_MIN_HALF_BITS = 2
# Keeps the held-out split apart from the permutation of any epoch.
_SPLIT_SALT = 0x68656C642D6F7574


def permute(index: int, size: int, seed: int) -> int:
    """Return the image of `index` in the permutation of `range(size)` given by `seed`."""
    return int(permute_array(np.array([index], dtype=np.int64), size, seed)[0])


def permute_array(indices: Indices, size: int, seed: int) -> Indices:
    """Return `permute` of every entry; memory is that of the entries, not of `size`."""
    assert size >= 1, f"permutation of {size} items"
    assert not len(indices) or 0 <= indices.min() <= indices.max() < size, "index out of range"
    half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed)
    images = _feistel(indices.astype(np.uint64), half_bits, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half_bits, keys)
    return images.astype(np.int64)


def mix_seed(*parts: int) -> int:
    """Return one 64-bit seed that depends on every part and on their order."""
    state = len(parts)
    for part in parts:
        word = (state + _GOLDEN) ^ part
        state = int(_scramble(np.array([word & _WORD_MASK], dtype=np.uint64))[0])
    return state


def _round_keys(seed: int) -> _Words:
    words = [(seed + number * _GOLDEN) & _WORD_MASK for number in range(1, _ROUNDS + 1)]
    return _scramble(np.array(words, dtype=np.uint64))


def _feistel(values: _Words, half_bits: int, keys: _Words) -> _Words:
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << shift) | right


def _scramble(words: _Words) -> _Words:
    """Return the finalizer of SplitMix64: one-to-one, each input bit affects all output bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Sample numbers of every step; each epoch visits each sample once."""

    num_samples: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        if self.num_samples < 1:
            raise DataError(
                f"the data set has {self.num_samples} samples; training needs at least 1: "
                f"check data.source"
            )
        if self.global_batch_size < 1:
            raise LayoutError(
                f"train.global_batch_size is {self.global_batch_size}; it must be at least 1"
            )

    def share(self, step: int, share_index: int, num_shares: int) -> Indices:
        """Return the contiguous part of a step's samples for one (data, z) coordinate."""
        size = self.share_size(num_shares)
        if not 0 <= share_index < num_shares:
            raise LayoutError(f"share {share_index} is outside 0..{num_shares - 1}")
        first = step * self.global_batch_size + share_index * size
        return self._numbered(first, first + size)

    def share_size(self, num_shares: int) -> int:
        """Return the samples of one share; refuse a global batch that does not divide."""
        if num_shares < 1 or self.global_batch_size % num_shares:
            raise LayoutError(
                f"train.global_batch_size = {self.global_batch_size} cannot be dealt evenly to "
                f"data * z = {num_shares} shares: choose a multiple of {num_shares}"
            )
        return self.global_batch_size // num_shares

    def _numbered(self, first: int, stop: int) -> Indices:
        assert first >= 0, "steps count from 0"
        numbers = np.arange(first, stop, dtype=np.int64)
        positions = numbers % self.num_samples
        if not self.shuffle:
            return positions
        epochs = numbers // self.num_samples
        for epoch in range(first // self.num_samples, (stop - 1) // self.num_samples + 1):
            here = epochs == epoch
            seed = mix_seed(self.seed, epoch)
            positions[here] = permute_array(positions[here], self.num_samples, seed)
        return positions


def split_indices(num_samples: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Return sorted, disjoint (train, held-out) samples.

    A fraction above 0 holds out at least one sample of two or more; training keeps at least one.
    """
    if num_samples < 1:
        raise DataError(f"the data set has {num_samples} samples; check data.source")
    if not 0 <= fraction < 1:
        raise DataError(f"data.val_fraction = {fraction} must be at least 0 and less than 1")
    wanted = max(round(fraction * num_samples), 1 if fraction > 0 else 0)
    num_held_out = min(wanted, num_samples - 1)
    everything = np.arange(num_samples, dtype=np.int64)
    order = permute_array(everything, num_samples, mix_seed(_SPLIT_SALT, seed, 0))
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])


def share_index(coordinates: Coordinates, mesh: Mesh) -> int:
    """Return the share of a global batch that a rank gets: data-major over (data, z)."""
    return coordinates.data * mesh.z + coordinates.z
