"""Agreement: the leader of a tensor group announces the actions that all of its ranks start.

The first rank of a group leads. Orders go over the same transport as activations, so that a rank
waits in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ganglion.decide.schedules.pipeline import Action, Order, action
from ganglion.errors import ProtocolError
from ganglion.execute.comm import Arrival, Transport

ORDER_KIND = "order_"  # and the kind of the action
_NOTHING = torch.empty(0)


class Agreement:
    """Carries orders from the leader of a group to the others."""

    def __init__(self, transport: Transport, members: Sequence[int], rank: int) -> None:
        """Belong to `rank`, one of the `members` of a tensor group."""
        self._transport = transport
        self._leader, *self._others = sorted(members)
        self.leads = rank == self._leader
        self._num_announced = 0
        self._num_obeyed = 0
        self._early: dict[int, Order] = {}

    def announce(self, started: Action) -> None:
        """Send the action that starts now to the other ranks."""
        kind, number = ORDER_KIND + started.kind, self._num_announced
        self._num_announced += 1
        for rank in self._others:
            self._transport.post(
                rank, kind, _NOTHING, step=number, stage=started.stage, microbatch=started.index
            )

    def orders(self, arrival: Arrival) -> Iterator[Order]:
        """Yield the orders that are next, once those before have come."""
        self._early[arrival.header.step] = self._order(arrival)
        while self._num_obeyed in self._early:
            yield self._early.pop(self._num_obeyed)
            self._num_obeyed += 1

    def _order(self, arrival: Arrival) -> Order:
        """Read an order; only the leader of a group may give one, and each once."""
        header = arrival.header
        if self.leads or arrival.source != self._leader:
            raise ProtocolError(
                f"rank {arrival.source} sent {header}, but rank {self._leader} leads this group"
            )
        if header.step < self._num_obeyed or header.step in self._early:
            raise ProtocolError(f"rank {arrival.source} sent {header}, which has come before")
        return Order(action(header.kind.removeprefix(ORDER_KIND), header.stage, header.microbatch))
