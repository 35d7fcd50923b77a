"""A pool of memory for large messages: the first touch of fresh pages costs more than a copy.

A block returns to the pool when the last tensor that lies in it is gone.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

LARGE_BYTES = 1 << 20  # below this, the system's allocator is as fast
_ROUND_BYTES = 1 << 21
MAX_KEPT = 4


class Blocks:
    """A few free blocks of memory."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return uninitialized bytes."""
        if num_bytes < LARGE_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        block = self._find(num_bytes)
        # torch keeps this view of the block as long as any tensor made from it.
        view = block.numpy()[:num_bytes]
        weakref.finalize(view, _give_back, self.free, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _find(self, num_bytes: int) -> Tensor:
        fitting = [b for b in tuple(self.free) if num_bytes <= b.numel() <= 2 * num_bytes]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self.free[:] = [block for block in self.free if block is not best]
            return best
        return torch.empty(-(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES, dtype=torch.uint8)


def _give_back(free: list[Tensor], block: Tensor) -> None:
    """Keep the unused block, and drop the oldest if there are too many."""
    free.append(block)
    if len(free) > MAX_KEPT:
        del free[0]
