"""Agreement in a tensor group: one leader decides what its stage does next, the others follow.

The ranks of a group run the same collectives inside a forward, but messages reach them in different
orders; ranks that each ran what came first would mismatch. So what the leader starts is told to the
others as ORDER messages, and a follower starts the head of its orders once its inputs are there.

    leader      next() -> 1F3, started   ~~~~ORDER 1F3~~~~>   follower  take(ORDER 1F3)
                                                                        next() -> 1F3

The order holds across lanes: an update changes the weights that the next forward gathers, so a
follower that ran the two the other way round would gather once too often.
"""

from __future__ import annotations

from collections import deque

from ganglion.decide.schedules.pipeline.action import Action, Order
from ganglion.decide.schedules.pipeline.schedule import RankSchedule


class Follower:
    """Starts what the leader started, in the leader's order; `schedule` keeps the books."""

    def __init__(self, schedule: RankSchedule) -> None:
        """Let orders decide for `schedule`."""
        self.schedule = schedule
        self._orders: deque[Action] = deque()

    def next(self) -> Action | None:
        """Return the head of the orders if it can start now, or None until something comes."""
        if not self._orders or not self.schedule.may_begin(self._orders[0]):
            return None
        chosen = self._orders.popleft()
        self.schedule.begin(chosen)
        return chosen

    def take(self, order: Order) -> None:
        """Take note of an order; all else is told to the schedule itself."""
        self._orders.append(order.action)
