"""The global norm of the gradients, and clipping by it, on the flat buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_norm(buffers: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all elements of all buffers, as a scalar of at least fp32."""
    if not buffers:
        return torch.zeros(())
    wide = max((buffer.dtype for buffer in buffers), key=lambda dtype: dtype.itemsize)
    dtype = wide if wide.itemsize >= 4 else torch.float32
    norms = [torch.linalg.vector_norm(buffer, dtype=dtype) for buffer in buffers]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return what brings gradients of this norm down to `max_norm`; None if they are smaller."""
    # Same rule as torch.nn.utils.clip_grad_norm_, so that a run can be compared with a plain loop.
    factor = max_norm / (norm + 1e-6)
    return factor if bool(factor < 1) else None


def clip_by_norm(buffers: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most `max_norm`; smaller ones stay untouched."""
    factor = clip_factor(norm, max_norm)
    if factor is not None:
        for buffer in buffers:
            buffer.mul_(factor)
