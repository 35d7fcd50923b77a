"""A driver without a clock: the next event is drawn at random among all that are possible.

The simulator orders events by time; this one lets messages overtake each other, actions end in any
order and ranks of a tensor group hear of things at different moments. Whatever order it draws, the
laws must hold. With `group_size` > 1 each rank of the pipeline is a group of leader and followers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ganglion.decide.schedules.pipeline import Follower, RankSchedule
from ganglion.decide.schedules.pipeline.action import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    Action,
    Message,
    Order,
)
from ganglion.decide.schedules.pipeline.laws import Case, LawBroken, Step, check_laws

Member = RankSchedule | Follower


class RandomDriver:
    """Runs the schedules of one pipeline, each `group_size` times over."""

    def __init__(
        self,
        make: Callable[[int], RankSchedule],
        batches: tuple[int, ...],
        group_size: int,
        seed: int,
    ) -> None:
        self._random = random.Random(seed)
        self._group_size = group_size
        first = make(0)
        self._map = first.stage_map
        self._plain = [[make(r) for _ in range(group_size)] for r in range(self._map.num_ranks)]
        self._members = [self._group(group) for group in self._plain]
        for group in self._plain:
            for schedule in group:
                for size in batches:
                    schedule.admit(size)
                schedule.stop_admitting()
        self._case = Case.of([group[0] for group in self._plain], batches)
        self._now = 0
        # The possible events: (rank, index in the group, end of an action or arrival).
        self._future: list[tuple[int, int, tuple[Action, int, int] | Message | Order]] = []
        self._steps: list[list[list[Step]]] = [[[] for _ in group] for group in self._plain]

    def _group(self, group: list[RankSchedule]) -> list[Member]:
        if self._group_size == 1:
            return [group[0]]
        return [group[0], *(Follower(other) for other in group[1:])]

    def run(self) -> None:
        """Run to the end, and hold every member of every group to the laws and to its leader."""
        for rank in range(self._map.num_ranks):
            for index in range(self._group_size):
                self._start(rank, index)
        while self._future:
            chosen = self._random.randrange(len(self._future))
            self._future[chosen], self._future[-1] = self._future[-1], self._future[chosen]
            rank, index, event = self._future.pop()
            self._now += 1
            self._happen(rank, index, event)
            self._start(rank, index)
        self._check()

    def _happen(
        self, rank: int, index: int, event: tuple[Action, int, int] | Message | Order
    ) -> None:
        member = self._members[rank][index]
        if isinstance(event, Order):
            assert isinstance(member, Follower)
            member.take(event)
        elif isinstance(event, Message):
            self._plain[rank][index].on_arrival(event)
        else:
            self._finish(rank, index, *event)

    def _finish(self, rank: int, index: int, action: Action, start: int, version: int) -> None:
        self._steps[rank][index].append(Step(action, start, self._now, version))
        self._plain[rank][index].on_finish(action)
        target = {FORWARD: action.stage + 1, BACKWARD: action.stage - 1}.get(action.kind, -1)
        if 0 <= target < self._map.num_stages:
            message = Message(action.kind, target, action.index, version)
            self._future.append((self._map.rank_of(target), index, message))

    def _start(self, rank: int, index: int) -> None:
        member = self._members[rank][index]
        while (action := member.next()) is not None:
            computes = action.lane == COMPUTE
            schedule = self._plain[rank][index]
            version = schedule.version_of(action.index) if computes else action.index
            self._future.append((rank, index, (action, self._now, version)))
            self._now += 1
            if index == 0:
                # Orders of one leader keep their order, as messages between two ranks do.
                for follower in range(1, self._group_size):
                    self._send_order(rank, follower, Order(action))

    def _send_order(self, rank: int, follower: int, order: Order) -> None:
        if any(r == rank and i == follower and isinstance(e, Order) for r, i, e in self._future):
            member = self._members[rank][follower]
            assert isinstance(member, Follower)
            earlier = [
                e for r, i, e in self._future if (r, i) == (rank, follower) and isinstance(e, Order)
            ]
            self._future = [
                (r, i, e)
                for r, i, e in self._future
                if not ((r, i) == (rank, follower) and isinstance(e, Order))
            ]
            for one in earlier:
                member.take(one)
            self._start(rank, follower)
        self._future.append((rank, follower, order))

    def _check(self) -> None:
        for index in range(self._group_size):
            stuck = [r for r, group in enumerate(self._plain) if not group[index].done]
            if stuck:
                raise LawBroken(f"ranks {stuck}, member {index}, never ended")
            check_laws(self._case, [step for rank in self._steps for step in rank[index]])
        for group in self._steps:
            orders = [_lanes(member) for member in group]
            if any(order != orders[0] for order in orders):
                raise LawBroken(f"followers did not do as their leader: {orders}")


def _lanes(steps: list[Step]) -> dict[str, list[tuple[Action, int]]]:
    """Return the actions of each lane in order, each with its version."""
    lanes: dict[str, list[tuple[Action, int]]] = {}
    for step in sorted(steps, key=lambda step: step.start_s):
        lanes.setdefault(step.action.lane, []).append((step.action, step.version))
    return lanes
