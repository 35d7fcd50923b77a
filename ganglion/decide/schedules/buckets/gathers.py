"""Which weight to gather next: the one that followed last time.

Weights stored in pieces along z are gathered for every use. The order of uses repeats: forward
through the layers, backward through them, with recomputation in between. So the use that followed
a use once is begun early the next time (AxoNN-4D's OAG):

    uses      F0  F1  F2  B2  B1  B0      gathers    0 | 1   2   . | 1   0
                                                     ^ begun while the one before is used

A weight that two layers share is used twice in a pass, so a place in the order is two uses: this
one and the one before. Every rank of a group sees the same uses and thus begins the same gathers in
the same order.

Some weights are kept from their first gather until they change; all others are gathered for each
use. Which ones, a budget of bytes decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FORWARD, RECOMPUTE, BACKWARD = "F", "R", "B"


class Use(NamedTuple):
    """One use of a weight: in which pass, and which weight."""

    phase: str
    weight: int


def kept_within(sizes: Sequence[int], budget: int) -> list[bool]:
    """Say which weights to keep gathered, of some sizes in the order of the model.

    From the first on, each that still fits into the budget. Every byte that is kept spares the same
    traffic, so what is left of the budget is all that another choice could win.
    """
    left, kept = budget, []
    for size in sizes:
        kept.append(size <= left)
        left -= size if kept[-1] else 0
    return kept


class _Place(NamedTuple):
    before: Use | None
    use: Use


class GatherOrder:
    """Learns the order of uses, and tells what comes after each."""

    def __init__(self) -> None:
        self._after: dict[_Place, Use] = {}
        self._place: _Place | None = None
        self._num_uses = 0  # since weights changed
        self._num_expected = 0  # as many as between the last two changes

    def on_use(self, use: Use) -> int | None:
        """Record a use; return the weight that will be used after it, if that is known."""
        before = None
        if self._place is not None:
            before = self._place.use
            self._after[self._place] = use
        self._place = _Place(before, use)
        following = self._after.get(self._place)
        self._num_uses += 1
        if self._num_uses == self._num_expected:
            return None  # weights change now: what is gathered before that is gathered in vain
        if following is None or following.weight == use.weight:
            return None  # a gather of what is in use would only hold the memory of two
        return following.weight

    def on_change(self) -> None:
        """Record that weights changed, and after how many uses."""
        if self._num_uses:
            self._num_expected = self._num_uses
        self._num_uses = 0
        self._place = None
