"""Embedding: a table whose rows are split over one axis and whose features over another.

A rank looks up the ids among its rows and contributes zeros for the others; the sum over the axis
of the rows is the lookup in the whole table. The table is stored in pieces along z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.execute.comm import Group
from ganglion.execute.tensor.numbers import check_numbers
from ganglion.execute.tensor.weights import StoredWeight, phase_now


@dataclass(frozen=True, slots=True)
class _Table:
    weight: StoredWeight
    group: Group | None  # splits the rows
    num_rows: int
    first: int


class SplitEmbedding(nn.Module):
    """nn.Embedding of a split table."""

    def __init__(self, stored: StoredWeight, group: Group | None, rows: range) -> None:
        """Hold `rows` of the whole table; `group` splits them."""
        super().__init__()
        self.weight = stored.parameter
        self.num_embeddings = len(rows) * (1 if group is None else group.size)
        self._table = _Table(stored, group, len(rows), rows.start)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids of any shape; this rank's features of them."""
        check_numbers(ids, self.num_embeddings, "id")
        vectors: Tensor = _LookUp.apply(self.weight, ids, self._table)  # type: ignore[no-untyped-call]
        return vectors


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ids: Tensor, table: _Table) -> Tensor:
        ctx.table = table
        block = table.weight.block(phase_now())
        if table.group is None:
            ctx.save_for_backward(ids)
            return F.embedding(ids, block)
        local = ids - table.first
        is_here = (local >= 0) & (local < table.num_rows)
        local = local.where(is_here, 0)
        ctx.save_for_backward(local, is_here)
        vectors = F.embedding(local, block) * is_here[..., None]
        table.group.all_reduce(vectors).wait()
        return vectors

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        table: _Table = ctx.table
        ids, *here = ctx.saved_tensors
        if here:
            gradient = gradient * here[0][..., None]
        block = gradient.new_zeros(table.num_rows, gradient.shape[-1])
        block.index_add_(0, ids.flatten(), gradient.flatten(0, -2))
        return table.weight.gradient(block), None, None
