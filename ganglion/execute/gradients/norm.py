"""The global norm of the gradients, and clipping by it, on the flat buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SQUARED_AT_ONCE = 2**16  # elements: 1 MiB of doubles, whatever the size of a buffer


def sum_of_squares(tensor: Tensor) -> float:
    """Return the sum over all elements in double precision, part by part.

    The parts depend on nothing but the tensor, so the same gradients have the same sum anywhere.
    """
    flat = tensor.reshape(-1)
    starts = range(0, max(1, flat.numel()), SQUARED_AT_ONCE)
    sums = [flat[start : start + SQUARED_AT_ONCE].double().square().sum() for start in starts]
    return float(torch.stack(sums).sum())


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
