"""Cross-entropy on logits whose classes are split: no rank ever sees all of them.

For each row a rank contributes its largest logit, the sum of exponentials relative to that, and the
logit of the target if it is among its classes. Every rank computes the same loss from these three
numbers of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ganglion.errors import LayoutError
from ganglion.execute.comm import Group
from ganglion.execute.tensor.layers import check_numbers

IGNORED = -100  # as in torch: rows with this target do not count


def split_cross_entropy(logits: Tensor, target: Tensor, group: Group) -> Tensor:
    """Return the mean loss over all rows of logits (..., classes of this rank), targets (...)."""
    if logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"cross_entropy got logits of shape {tuple(logits.shape)} and a target of shape "
            f"{tuple(target.shape)}: the target must be {tuple(logits.shape[:-1])}, one class "
            f"number for each row of logits"
        )
    counted = target.where(target != IGNORED, 0)
    check_numbers(counted, logits.shape[-1] * group.size, "class")
    rows = logits.flatten(0, -2)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    loss: Tensor = _CrossEntropy.apply(wide, target.flatten(), group)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group) -> Tensor:
        first = group.index * logits.shape[1]
        place = (target - first).clamp(0, logits.shape[1] - 1)[:, None]
        is_here = (target >= first) & (target < first + logits.shape[1])
        largest = logits.amax(1)
        exponentials = (logits - largest[:, None]).exp_()
        chosen = logits.gather(1, place)[:, 0] * is_here
        mine = torch.stack((largest, exponentials.sum(1), chosen))
        top, total, chosen = _combined(mine, group)
        counts = target != IGNORED
        num_rows = counts.sum()
        losses = (top + total.log() - chosen) * counts
        # To softmax of this rank's classes, in place.
        exponentials *= ((largest - top).exp() / total)[:, None]
        ctx.save_for_backward(exponentials, place, is_here, counts, num_rows)
        return losses.sum() / num_rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, place, is_here, counts, num_rows = ctx.saved_tensors
        change = softmax.scatter_add(1, place, -is_here.to(softmax.dtype)[:, None])
        change *= (counts * gradient / num_rows)[:, None]
        return change, None, None


def _combined(mine: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of exponentials relative to it, and the target's logit."""
    all_ = mine.new_empty((group.size * 3, mine.shape[1]))
    group.all_gather(all_, mine).wait()
    largest, sums, chosen = all_.view(group.size, 3, -1).unbind(1)
    top = largest.amax(0)
    return top, (sums * (largest - top).exp()).sum(0), chosen.sum(0)
