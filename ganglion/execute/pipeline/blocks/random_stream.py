"""Random numbers that do not depend on the layout: one stream for each microbatch and block.

Dropout draws the same mask whichever rank runs a block, in whichever order microbatches come, and
again when a forward is repeated. Microbatches are counted over the whole global batch, so it does
not matter either among how many replicas they are dealt out.
"""

from __future__ import annotations

import torch

from ganglion.execute.data import mix_seed

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1
_MAX_BLOCKS = 1 << 16


class RandomStream:
    """The random numbers of one share of the batches."""

    def __init__(self, seed: int, first_microbatch: int) -> None:
        """Begin the stream of a share whose first microbatch has this number in its batch."""
        self._seed = seed
        self._first_microbatch = first_microbatch
        self._step = -1
        self._base = 0

    def seed_block(self, step: int, microbatch: int, block: int) -> None:
        """Let the numbers drawn from now on be those of a block."""
        if step != self._step:
            self._step, self._base = step, mix_seed(self._seed, step)
        place = (self._first_microbatch + microbatch) * _MAX_BLOCKS + block
        _seed((self._base + place * _ODD) & _MASK)


def _seed(seed: int) -> None:
    """Seed what draws here: torch.manual_seed formats a stack for every backend that is not on."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
