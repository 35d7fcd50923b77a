"""Pipelines on a virtual clock: the second driver of the schedules, beside the engine.

One heap holds future events: the end of an action, the arrival of a message, the end of a transfer
on a shared link. After each event its rank is asked what it starts now.

    pop (time, rank, event) -> on_finish / on_arrival -> next(), next(), ... -> push their ends

Replicas of the pipeline meet in their reductions. Without jitter and disturbances they are all
alike, and only one is simulated.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import NamedTuple

from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    UPDATE,
    WEIGHT,
    Action,
    Message,
    RankSchedule,
)
from ganglion.decide.simulator.options import Disturbance, SimulationOptions, end_of
from ganglion.decide.simulator.result import MessageRow, Simulation, StepRow
from ganglion.decide.simulator.wires import LinkEnd, Wires
from ganglion.errors import LayoutError, ProtocolError

MakeSchedule = Callable[[int], RankSchedule]


def simulate(
    make: MakeSchedule,
    times: Sequence[StageTimes],
    batches: Sequence[int],
    options: SimulationOptions | None = None,
) -> Simulation:
    """Run one schedule per rank over some batches and return what happened.

    `make(rank)` returns the schedule of a rank of the pipeline; `times` has one entry per stage.
    Raise ProtocolError, naming the stages that wait, if the schedules halt before they are done.
    """
    if not times:
        raise LayoutError("a pipeline of 0 stages has nothing to do; use 1 or more")
    options = options or SimulationOptions()
    num_replicas = num_simulated(times, options.num_replicas, options.disturbances)
    schedules = _opened(make, times, batches, num_replicas)
    with _collector_resting():
        rows, messages = _Driver(schedules, times, options, batches).run()
    return Simulation(
        stage_map=schedules[0].stage_map,
        batches=tuple(batches),
        num_replicas=num_replicas,
        rows=rows,
        messages=messages,
    )


def num_simulated(
    times: Sequence[StageTimes], num_replicas: int, disturbances: Sequence[Disturbance]
) -> int:
    """Return how many replicas to simulate: one, if all are alike."""
    alike = not disturbances and not any(stage.jitter for stage in times)
    return 1 if alike else num_replicas


@contextmanager
def _collector_resting() -> Iterator[None]:
    """Disable the garbage collector: searching rows that are all in use costs a fifth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _opened(
    make: MakeSchedule, times: Sequence[StageTimes], batches: Sequence[int], num_replicas: int
) -> list[RankSchedule]:
    """Return the schedules of all replicas, with all batches admitted."""
    stage_map = make(0).stage_map
    if len(times) != stage_map.num_stages:
        raise LayoutError(
            f"{len(times)} stage times were given for {stage_map.num_stages} stages "
            f"({stage_map.num_ranks} ranks x {stage_map.num_chunks} chunks): give one for each"
        )
    schedules = [make(rank) for _ in range(num_replicas) for rank in range(stage_map.num_ranks)]
    for schedule in schedules:
        for size in batches:
            schedule.admit(size)
        schedule.stop_admitting()
    return schedules


# When a message arrived, whether it is a gradient, and the message: of two that arrive at the same
# time the activation comes first, as in a scan over (activation, gradient).
_Arrival = tuple[float, bool, Message]
_arrival = itemgetter(0, 1)


class _Driver:
    """The state of one simulation; a `sim_rank` counts simulated ranks, replica by replica."""

    def __init__(
        self,
        schedules: list[RankSchedule],
        times: Sequence[StageTimes],
        options: SimulationOptions,
        batches: Sequence[int],
    ) -> None:
        self._schedules = schedules
        stage_map = schedules[0].stage_map
        self._num_ranks, self._num_stages = stage_map.num_ranks, stage_map.num_stages
        self._num_replicas = len(schedules) // self._num_ranks
        self._noise = random.Random(options.seed)
        self._jitter = [stage.jitter for stage in times]
        self._base_s = _base_times(times, schedules[0].splits_backward)
        self._disturbed = _by_sim_rank(options.disturbances, len(schedules))
        self._blocks = _Blocks(options.blocked_s, batches) if options.blocked_s else None
        self._is_steady = not any(self._jitter) and not options.disturbances
        self._computing = [False] * len(schedules)
        self._stopped = [False] * len(schedules)  # to sum gradients; messages wait as in computing
        self._inbox: list[list[_Arrival]] = [[] for _ in schedules]
        self._heap: list[tuple[float, int, int, _Event]] = []
        self._num_pushed = 0
        self._rows: list[StepRow] = []
        self._messages: list[MessageRow] = []
        self._wires = Wires(times, options.network, self._num_replicas, self._push, self._messages)
        self._rank_of = [stage_map.rank_of(stage) for stage in range(self._num_stages)]

    def run(self) -> tuple[list[StepRow], list[MessageRow]]:
        heap, pop, start_all = self._heap, heapq.heappop, self._start_all
        computing, inbox, schedules = self._computing, self._inbox, self._schedules
        for sim_rank in range(len(schedules)):
            start_all(sim_rank, 0.0)
        while heap:
            now_s, _, sim_rank, event = pop(heap)
            if type(event) is Message:
                if computing[sim_rank]:
                    inbox[sim_rank].append((now_s, event.kind != FORWARD, event))
                    continue
                schedules[sim_rank].on_arrival(event)
            elif type(event) is LinkEnd:
                self._wires.on_link_end(now_s, event)
                continue
            elif type(event) is Resume:
                computing[sim_rank] = self._stopped[sim_rank] = False
            else:
                self._finish(sim_rank, event)  # type: ignore[arg-type]
            start_all(sim_rank, now_s)
        stuck = [sim_rank for sim_rank, schedule in enumerate(self._schedules) if not schedule.done]
        if stuck:
            raise ProtocolError(f"stages {stuck} wait for messages that will never be sent")
        return self._rows, self._messages

    def _start_all(self, sim_rank: int, now_s: float) -> None:
        if self._stopped[sim_rank]:
            return
        schedule, inbox = self._schedules[sim_rank], self._inbox[sim_rank]
        if inbox:  # messages that arrived while the rank computed
            if len(inbox) > 1:
                inbox.sort(key=_arrival)
            for _, _, message in inbox:
                schedule.on_arrival(message)
            inbox.clear()
        while (action := schedule.next()) is not None:
            if action.kind == REDUCE:
                self._wires.reduce(now_s, sim_rank, action)
                continue
            version = action.index
            if action.lane == COMPUTE:
                self._computing[sim_rank] = True
                version = schedule.version_of(version)
            if self._is_steady:
                end_s = now_s + self._base_s[action.stage][action.kind]
            else:
                end_s = self._end_s(sim_rank, action, now_s)
            self._push(end_s, sim_rank, (action, now_s, end_s, version, sim_rank))

    def _finish(self, sim_rank: int, row: StepRow) -> None:
        self._rows.append(row)
        action, _, end_s, version, _ = row
        self._schedules[sim_rank].on_finish(action)
        if action.lane != COMPUTE:
            return
        self._computing[sim_rank] = False
        kind = action.kind
        if kind != WEIGHT:
            stage = action.stage + (1 if kind == FORWARD else -1)
            if 0 <= stage < self._num_stages:
                target = sim_rank - sim_rank % self._num_ranks + self._rank_of[stage]
                message = Message(kind, stage, action.index, version)
                self._wires.send(end_s, message, action.stage, sim_rank, target)
        if self._blocks and self._blocks.ends_batch(sim_rank, action):
            self._computing[sim_rank] = self._stopped[sim_rank] = True
            self._push(end_s + self._blocks.blocked_s[action.stage], sim_rank, Resume())

    def _push(self, time_s: float, sim_rank: int, event: _Event) -> None:
        # The running number orders events of the same time, so that runs are repeatable.
        heapq.heappush(self._heap, (time_s, self._num_pushed, sim_rank, event))
        self._num_pushed += 1

    def _end_s(self, sim_rank: int, action: Action, now_s: float) -> float:
        stage = action.stage
        work_s = self._base_s[stage][action.kind]
        if action.lane == COMPUTE:
            if self._jitter[stage]:
                work_s *= self._noise.lognormvariate(0.0, self._jitter[stage])
            if self._disturbed[sim_rank]:
                return end_of(work_s, now_s, self._disturbed[sim_rank])
        return now_s + work_s


class Resume(NamedTuple):
    """The end of the time for which a rank stopped to sum gradients and to update."""


_Event = StepRow | Message | LinkEnd | Resume


class _Blocks:
    """Counts the backwards of each batch, after whose last one a rank stops."""

    def __init__(self, blocked_s: Sequence[float], batches: Sequence[int]) -> None:
        self.blocked_s = blocked_s
        self._batches = batches
        self._batch_of = [batch for batch, size in enumerate(batches) for _ in range(size)]
        self._num_ended: Counter[tuple[int, int, int]] = Counter()

    def ends_batch(self, sim_rank: int, action: Action) -> bool:
        """Record the end of an action; return whether it is the last backward of a batch."""
        if action.kind != BACKWARD:
            return False
        batch = self._batch_of[action.index]
        key = (sim_rank, action.stage, batch)
        self._num_ended[key] += 1
        return self._num_ended[key] == self._batches[batch]


def _base_times(times: Sequence[StageTimes], splits_backward: bool) -> list[dict[str, float]]:
    return [
        {
            FORWARD: stage.forward_s,
            BACKWARD: stage.backward_s + (0.0 if splits_backward else stage.weight_s),
            WEIGHT: stage.weight_s,
            UPDATE: stage.update_s,
        }
        for stage in times
    ]


def _by_sim_rank(disturbances: Sequence[Disturbance], num_ranks: int) -> list[list[Disturbance]]:
    by_rank: list[list[Disturbance]] = [[] for _ in range(num_ranks)]
    for disturbance in disturbances:
        if not 0 <= disturbance.rank < num_ranks:
            raise LayoutError(
                f"a disturbance was asked for rank {disturbance.rank}, but ranks go from 0 to "
                f"{num_ranks - 1}"
            )
        by_rank[disturbance.rank].append(disturbance)
    return by_rank
