"""Agreement in a tensor group: one leader decides what its stage does next, the others follow.

The ranks of a group run the same collectives inside a forward, but messages reach them in different
orders; ranks that each ran what came first would mismatch. So the leader's choices travel to the
others as ORDER messages, and a follower starts the head of each lane's orders once its own inputs
are there.

    leader      next() -> 1F3       take_orders() -> [1F3]  ~~~~>  follower  on_arrival(1F3)
                                                                             next() -> 1F3
"""

from __future__ import annotations

from collections import deque

from ganglion.schedules.action import COMM, COMPUTE, HOST, Action, Message, Order
from ganglion.schedules.schedule import RankSchedule
from ganglion.schedules.stage_map import StageMap


class _Wrapped:
    """Passes the contract on to the schedule inside."""

    def __init__(self, schedule: RankSchedule) -> None:
        """Wrap the schedule of one rank of a tensor group."""
        self._inner = schedule

    @property
    def stage_map(self) -> StageMap:
        """Who holds which stage."""
        return self._inner.stage_map

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are an action of their own."""
        return self._inner.splits_backward

    @property
    def done(self) -> bool:
        """Whether all admitted work has ended and none will follow."""
        return self._inner.done

    def admit(self, num_microbatches: int) -> None:
        """Let one more batch enter."""
        self._inner.admit(num_microbatches)

    def stop_admitting(self) -> None:
        """Say that no batch will follow."""
        self._inner.stop_admitting()

    def on_finish(self, finished: Action) -> None:
        """Take note of the end of an action."""
        self._inner.on_finish(finished)

    def version_of(self, microbatch: int) -> int:
        """Return the weights that forward and backward of a microbatch use."""
        return self._inner.version_of(microbatch)


class Leader(_Wrapped):
    """Decides, and keeps what it decided for the driver to send on."""

    def __init__(self, schedule: RankSchedule) -> None:
        """Let `schedule` decide for its group."""
        super().__init__(schedule)
        self._orders: list[Order] = []

    def next(self) -> Action | None:
        """Return an action to start now, or None until something happens."""
        chosen = self._inner.next()
        if chosen is not None:
            self._orders.append(Order(chosen))
        return chosen

    def take_orders(self) -> list[Order]:
        """Return what was decided since the last call; the driver sends it to every follower."""
        orders, self._orders = self._orders, []
        return orders

    def on_arrival(self, message: Message) -> None:
        """Take note of an activation or a gradient."""
        self._inner.on_arrival(message)


class Follower(_Wrapped):
    """Starts what the leader started, lane by lane in the leader's order."""

    def __init__(self, schedule: RankSchedule) -> None:
        """Let `schedule` keep the books, and orders decide."""
        super().__init__(schedule)
        self._orders: dict[str, deque[Action]] = {lane: deque() for lane in (COMPUTE, COMM, HOST)}

    def next(self) -> Action | None:
        """Return the head of a lane's orders that can start now, or None until something comes."""
        for orders in self._orders.values():
            if orders and self._inner.may_begin(orders[0]):
                chosen = orders.popleft()
                self._inner.begin(chosen)
                return chosen
        return None

    def on_arrival(self, message: Message | Order) -> None:
        """Take note of an activation, a gradient or an order."""
        if isinstance(message, Order):
            self._orders[message.action.lane].append(message.action)
        else:
            self._inner.on_arrival(message)
