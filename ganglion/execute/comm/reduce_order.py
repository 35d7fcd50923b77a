"""The order in which contributions are combined: fixed, so that equal inputs give equal bits.

Sums are taken in order of rank, not of arrival: ((r0 + r1) + r2) + r3. `reduce` uses a
binomial tree; for four members and root 0:

    0 <-- 1     2 <-- 3        (r0 + r1), (r2 + r3)
    0 <-------- 2              (r0 + r1) + (r2 + r3)

16-bit floats are added in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ganglion.execute.comm.collectives import MAX

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def combine(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """Write the combination of `parts`, in their order, to `out`.

    `out` may be the same memory as one of the first two parts, but not as a later one.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif op == MAX:
        _accumulate(torch.maximum, parts, out)
    elif len(parts) > 2 and out.dtype in _WIDE:
        total = parts[0].to(_WIDE[out.dtype])
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:  # torch adds two 16-bit floats in float32 itself
        _accumulate(torch.add, parts, out)


def combine_aliased(parts: Sequence[Tensor], index: int, op: str) -> None:
    """Write the combination of `parts` over the part at position `index`."""
    if index < 2:
        return combine(parts, parts[index], op)
    total = torch.empty_like(parts[index])
    combine(parts, total, op)
    parts[index].copy_(total)


def combine_by_tree(parts: Sequence[Tensor], root: int, out: Tensor, op: str) -> None:
    """Write the combination of `parts` along the binomial tree of `root` to `out`.

    `out` may be the same memory as any part.
    """
    held = [widened(part) for part in parts]
    for into, source in tree_pairs(len(parts), root):
        held[into] = combine_two(held[into], held[source], op)
    out.copy_(held[root])


def widened(part: Tensor) -> Tensor:
    """Return `part` in the dtype that its sums are taken in."""
    return part.detach().to(_WIDE.get(part.dtype, part.dtype))


def combine_two(first: Tensor, second: Tensor, op: str) -> Tensor:
    """Return the combination of two parts."""
    return torch.maximum(first, second) if op == MAX else torch.add(first, second)


def tree_pairs(size: int, root: int) -> Iterator[tuple[int, int]]:
    """Yield (into, from) positions of a binomial tree, leaves first."""
    step = 1
    while step < size:
        for low in range(0, size - step, 2 * step):
            yield (low + root) % size, (low + step + root) % size
        step *= 2


def _accumulate(operation: Callable[..., Tensor], parts: Sequence[Tensor], out: Tensor) -> None:
    operation(parts[0], parts[1], out=out)
    for part in parts[2:]:
        operation(out, part, out=out)
