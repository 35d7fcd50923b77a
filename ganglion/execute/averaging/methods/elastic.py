"""The elastic force between a worker and the centre, on flat vectors and without any ranks.

    e = alpha * (w - c)        w <- w - e        c <- c + e

Both halves read the same old (w, c), so w + c is kept: with the gradients off, the sum of the
centre and all workers never changes (Zhang, Choromanska, LeCun 2015, equations 3 to 6).
"""

from __future__ import annotations

import torch
from torch import Tensor


def elastic_force(
    worker: Tensor, center: Tensor, alpha: float, out: Tensor | None = None
) -> Tensor:
    """Return alpha * (worker - center), in `out` if given."""
    return torch.sub(worker, center, out=out).mul_(alpha)


def elastic_step_(worker: Tensor, center: Tensor, alpha: float) -> None:
    """Move a worker and the centre towards each other, by one and the same force."""
    force = elastic_force(worker, center, alpha)
    worker.sub_(force)
    center.add_(force)
