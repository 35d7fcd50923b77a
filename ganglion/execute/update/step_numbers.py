"""The numbers that ranks gather once a step, without waiting for each other.

Every rank puts in its loss, the sum of squares of its gradients, whether it was asked to stop and
its memory; every rank gets the table. It is started when a batch is back on a rank and read when
the numbers are needed, so a pipeline that never flushes does not stop for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ganglion.execute.comm import Group, Handle, World


@dataclass(slots=True)
class _Table:
    handle: Handle
    rows: Tensor


class StepNumbers:
    """Tables of the steps under way."""

    def __init__(
        self,
        world: World,
        own_numbers: Callable[[], tuple[float, float]],
        *,
        loss_pipe: int,
        by_replica: bool = False,
        among: Group | None = None,
    ) -> None:
        """Exchange over all ranks; the losses are at pipe coordinate `loss_pipe`.

        `own_numbers` gives (asked to stop, bytes of memory). Replicas hold the same gradients,
        unless each has its own, `by_replica`. With a group `among`, the ranks of it are all.
        """
        self._world = world
        # Made now: ranks meet to make a group, and in a pipeline they are never at the same place.
        self._among = world.everyone() if among is None else among
        self._own_numbers = own_numbers
        self._tables: dict[int, _Table] = {}
        coordinates = [world.mesh.coordinates(rank) for rank in self._among.ranks]
        known = sorted({at.data for at in coordinates})
        replicas = known if by_replica else known[:1]
        self._replicas = [[r for r, at in enumerate(coordinates) if at.data == d] for d in replicas]
        self._own = replicas.index(world.coordinates.data) if by_replica else 0
        self._with_loss = [rank for rank, at in enumerate(coordinates) if at.pipe == loss_pipe]

    def is_started(self, step: int) -> bool:
        """Return whether this rank has put its numbers in."""
        return step in self._tables

    def start(self, step: int, loss: float, square_norm: float) -> None:
        """Put this rank's numbers of a step in."""
        handle, rows = self._world.start_gather(
            [loss, square_norm, *self._own_numbers()], self._among
        )
        self._tables[step] = _Table(handle, rows)

    def is_done(self, step: int) -> bool:
        """Return whether the numbers of all ranks are there, without waiting."""
        return self._tables[step].handle.is_done()

    def norm(self, step: int) -> float:
        """Return the norm of all gradients of this replica; wait for the numbers of all ranks."""
        return self._norm_of(step, self._own)

    def take(self, step: int) -> tuple[float, float, bool, int]:
        """Return loss, norm, whether to stop and the most bytes of any rank; forget the step."""
        norms = [self._norm_of(step, replica) for replica in range(len(self._replicas))]
        rows = self._rows(step)
        del self._tables[step]
        loss = float(rows[self._with_loss, 0].mean())
        return loss, sum(norms) / len(norms), bool(rows[:, 2].any()), int(rows[:, 3].max())

    def _norm_of(self, step: int, replica: int) -> float:
        square = float(self._rows(step)[self._replicas[replica], 1].sum())
        # Rounding may leave a negative sum, but NaN must stay NaN.
        return 0.0 if square < 0 else math.sqrt(square)

    def _rows(self, step: int) -> Tensor:
        table = self._tables[step]
        table.handle.wait()
        return table.rows
