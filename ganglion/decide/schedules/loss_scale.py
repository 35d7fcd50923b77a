"""The loss scale of fp16: a larger loss has larger gradients, so that small ones do not vanish.

It is halved when a gradient overflowed and doubled after many batches without overflow. Every rank
keeps its own copy: all see the same verdicts in the same order, so no scale is ever sent.

    batch        0    1    2    3    4              a pipeline that flushes: delay 0
    scale        s    s    s   s/2  s/2
    verdict     fine fine  bad fine                 batch 2 changes nothing but the scale

In a pipeline that never flushes, a batch begins before the verdict on the previous one is known:
the scale of batch b follows from verdicts up to b - 2 (delay 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

INITIAL, LOWEST, HIGHEST = 2.0**16, 2.0**10, 2.0**24
PATIENCE = 200  # fine batches before the scale is doubled


class ScaleState(NamedTuple):
    """The state in a checkpoint: the scales of the next batches, and the fine batches so far."""

    scales: tuple[float, ...]
    num_fine: int


class LossScale:
    """The scales of the batches that are under way, from AxoNN's rule."""

    def __init__(
        self,
        *,
        delay: int = 0,
        initial: float = INITIAL,
        lowest: float = LOWEST,
        highest: float = HIGHEST,
        patience: int = PATIENCE,
    ) -> None:
        """Begin at batch 0; `delay` counts the batches that begin before a verdict is known."""
        assert 0 < lowest <= initial <= highest and patience > 0 and delay >= 0
        self._delay = delay
        self._initial = initial
        self._lowest = lowest
        self._highest = highest
        self._patience = patience
        self._scales: dict[int, float] = {}
        self._newest = initial
        self._num_fine = 0
        self.restart(0)

    def scale_of(self, batch: int) -> float:
        """Return the factor of the loss of a batch."""
        assert batch in self._scales, f"the scale of batch {batch} is not known yet, or forgotten"
        return self._scales[batch]

    def record(self, batch: int, is_fine: bool) -> None:
        """Record whether all gradients of a batch are finite; call once per batch, in order."""
        used = self._scales.pop(batch)
        if is_fine:
            self._num_fine += 1
            if self._num_fine == self._patience:
                self._newest = min(self._highest, 2 * self._newest)
                self._num_fine = 0
        else:
            # A batch begun before the scale fell does not lower the new scale further.
            self._newest = max(self._lowest, min(self._newest, used / 2))
            self._num_fine = 0
        self._scales[batch + 1 + self._delay] = self._newest

    def state(self) -> ScaleState:
        """Return the arguments from which `restart` continues."""
        return ScaleState(tuple(self._scales.values()), self._num_fine)

    def restart(self, batch: int, scales: Sequence[float] = (), num_fine: int = 0) -> None:
        """Continue before `batch` with saved scales, the newest last; without any, begin anew."""
        known = list(scales) or [self._initial]
        missing = max(0, self._delay + 1 - len(known))
        upcoming = (known[:1] * missing + known)[-self._delay - 1 :]
        self._scales = dict(enumerate(upcoming, start=batch))
        self._newest = upcoming[-1]
        self._num_fine = num_fine
