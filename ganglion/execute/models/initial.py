"""Initial weights by shard: element i of a parameter is a function of (seed, name, i) alone.

Philox (Salmon et al., SC 2011) makes random bits from a key and a counter, so any element can be
drawn by itself. The key is seed and name, the counter the element's index in the whole parameter. A
rank draws only its piece, and all layouts begin with the same weights:

    whole    0  1  2  3 |  4  5  6  7       the right half of the columns is two runs of counters,
             8  9 10 11 | 12 13 14 15       4..7 and 12..15
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ganglion.decide.topology import Box
from ganglion.errors import ConfigError

_Words = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.float64]
_Run = tuple[int, Tensor]  # index of its first element in the whole; its part of the piece

_WORDS_PER_COUNTER = 4
_MAX_DRAWN = 1 << 14  # at a time, so that numbers stay in the cache until they are copied


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal numbers around zero."""

    std: float


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform numbers from -bound to bound."""

    bound: float


@dataclass(frozen=True, slots=True)
class Constant:
    """The same number everywhere."""

    value: float


Initial = Normal | Uniform | Constant


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The initial value of every tensor of a model by its serial name, and the seed."""

    values: Mapping[str, Initial]
    seed: int

    def fill(self, piece: Tensor, name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
        """Fill a piece of the tensor `name`, whose whole has `shape`."""
        if name not in self.values:
            raise ConfigError(
                f"no initial value is known for {name!r}, one of the model's tensors: add it to "
                f"the {len(self.values)} that are given, or build the model with its weights"
            )
        fill(piece, self.values[name], seed=self.seed, name=name, shape=shape, boxes=boxes)


def drawn_seed() -> int:
    """Return a seed from torch's generator, set by torch.manual_seed."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


def fill(
    piece: Tensor,
    initial: Initial,
    *,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    boxes: Iterable[Box],
) -> None:
    """Fill `piece`, which is made of the `boxes` of a tensor of `shape`, with its initial values.

    Any partition into boxes gives the same whole; any dtype gives the same numbers, rounded.
    """
    piece = piece.detach()
    if isinstance(initial, Constant):
        piece.fill_(initial.value)
        return
    key = _key(seed, name)
    for box in boxes:
        for batch in _batches(_runs(piece, shape, box)):
            words = [_words(key, first, run.numel()) for first, run in batch]
            numbers = torch.from_numpy(_numbers(initial, np.concatenate(words)))
            parts = numbers.split_with_sizes([run.numel() for _, run in batch])
            for (_, run), part in zip(batch, parts, strict=True):
                run.copy_(part)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def _runs(piece: Tensor, shape: tuple[int, ...], box: Box) -> Iterator[_Run]:
    """Yield the parts of a box that are contiguous in the whole."""
    inside = piece[box.in_piece]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in product(*map(range, box.size[: _run_dim(shape, box.size)])):
        inner = (0,) * (len(shape) - len(index))
        start = map(sum, zip(box.start, (*index, *inner), strict=True))
        first = sum(at * stride for at, stride in zip(start, strides, strict=True))
        run = inside[index].view(-1)  # a view or an error, never a copy
        for begin in range(0, run.numel(), _MAX_DRAWN):
            yield first + begin, run[begin : begin + _MAX_DRAWN]


def _batches(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Group short runs: there may be one for each row of a matrix."""
    batch: list[_Run] = []
    num_drawn = 0
    for run in runs:
        if batch and num_drawn + run[1].numel() > _MAX_DRAWN:
            yield batch
            batch, num_drawn = [], 0
        batch.append(run)
        num_drawn += run[1].numel()
    if batch:
        yield batch


def _run_dim(shape: tuple[int, ...], size: tuple[int, ...]) -> int:
    """Return the last dim that a box does not span; all before it break its runs."""
    dim = max(0, len(shape) - 1)
    while dim > 0 and size[dim] == shape[dim]:
        dim -= 1
    return dim


def _numbers(initial: Normal | Uniform, words: _Words) -> _Numbers:
    """Return the value that each 64-bit word gives."""
    if isinstance(initial, Uniform):
        even: _Numbers = (words >> np.uint64(11)) * np.float64(2.0**-52) - 1.0
        return initial.bound * even
    # Box and Muller 1958: radius from the upper half, without log(0), angle from the lower.
    upper = ((words >> np.uint64(32)) + np.uint64(1)) * 2.0**-32
    angle = (words & np.uint64(0xFFFFFFFF)) * (2.0 * math.pi * 2.0**-32)
    normal: _Numbers = np.sqrt(-2.0 * np.log(upper)) * np.cos(angle)
    return initial.std * normal


def _words(key: int, first: int, count: int) -> _Words:
    """Return the words of `count` elements from `first` on."""
    counter, skipped = divmod(first, _WORDS_PER_COUNTER)
    words = np.random.Philox(counter=counter, key=key).random_raw(skipped + count)
    assert isinstance(words, np.ndarray)
    return words[skipped:]
