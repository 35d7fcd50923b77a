"""Error feedback: late gradients, answered by applying the update twice and taking the last back.

Under a delay of one, update t comes from the weights before the newest. Where the optimizer would
move the weights by u(t), they move by

    2 u(t) - u(t-1)  =  u(t) + (u(t) - u(t-1))

The second part mends the update before this one: u(t) is the better guess at it, made from newer
weights (2606.30634). Summed up, the weights have moved by all updates and by the last once more:
one step ahead, as the gradients are one step behind. This holds from the first update on if
u(-1) = 0, so the first is applied twice; a warm-up of the learning rate keeps it small.

It sees weights only, before and after: optimizers, clipping and decay are none of its business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ganglion.execute.update.versions import WeightVersions


class ErrorFeedback:
    """Corrects each new version of some weights by the update that made the one before.

    `previous` holds that update by the name of its parameter: save it and fill it in place.
    """

    def __init__(self, versions: WeightVersions) -> None:
        """Begin with no update made."""
        self._versions = versions
        self._flat = {dtype: torch.zeros_like(old) for dtype, old, _ in versions.in_making()}
        self.previous: dict[str, Tensor] = versions.views_of(self._flat)

    def correct(self) -> None:
        """Correct the version in the making; call it between the optimizers and `end_update`."""
        for dtype, old, new in self._versions.in_making():
            update = new - old
            new.add_(update).sub_(self._flat[dtype])
            self._flat[dtype].copy_(update)
