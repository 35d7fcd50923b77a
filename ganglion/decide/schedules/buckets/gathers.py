"""Which weight to gather next: the one that followed last time.

Weights stored in pieces along z are gathered for every use. The order of uses repeats: forward
through the layers, backward through them, with recomputation in between. So the gather for the use
that followed last time begins early (AxoNN-4D's OAG):

    uses      F0  F1  F2  B2  B1  B0      gathers    0 | 1   2   . | 1   0
                                                     ^ begun while the one before is used

A weight that two layers share is used twice in a pass, so a position in the order is given by two
uses: this one and the one before. Every rank of a group sees the same uses and thus begins the same
gathers in the same order.

A budget of bytes decides which weights are kept from their first gather until they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FORWARD, RECOMPUTE, BACKWARD = "F", "R", "B"


class Use(NamedTuple):
    """One use of a weight in a pass."""

    phase: str
    weight: int


def kept_within(sizes: Sequence[int], budget: int) -> list[bool]:
    """Return for each weight, in the order of the model, whether to keep it gathered.

    Each weight that still fits into the budget is kept. Every byte kept spares the same traffic, so
    another choice could gain no more than the rest of the budget.
    """
    left, kept = budget, []
    for size in sizes:
        kept.append(size <= left)
        left -= size if kept[-1] else 0
    return kept


class _Position(NamedTuple):
    before: Use | None
    use: Use


class GatherOrder:
    """Learns the order of uses, and predicts the next one."""

    def __init__(self) -> None:
        self._after: dict[_Position, Use] = {}
        self._position: _Position | None = None
        self._num_uses = 0  # since weights changed
        self._num_expected = 0  # uses between the last two changes

    def on_use(self, use: Use) -> int | None:
        """Record a use; return the weight to gather for the next use, if there is one."""
        before = None
        if self._position is not None:
            before = self._position.use
            self._after[self._position] = use
        self._position = _Position(before, use)
        following = self._after.get(self._position)
        self._num_uses += 1
        if self._num_uses == self._num_expected:
            return None  # weights change now: a gather before that would be useless
        if following is None or following.weight == use.weight:
            return None  # a second gather of the weight in use would double its memory
        return following.weight

    def on_change(self) -> None:
        """Record that weights changed."""
        if self._num_uses:
            self._num_expected = self._num_uses
        self._num_uses = 0
        self._position = None
