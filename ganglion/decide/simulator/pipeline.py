"""Pipelines on a virtual clock: the second driver of the schedules, beside the engine.

One heap holds what will happen: the end of an action, the arrival of a message, the end of a
transfer on a shared link. After each, the rank it happened on is asked for what it starts now.

    pop (time, rank, event) -> on_finish / on_arrival -> next(), next(), ... -> push their ends

Several replicas of the pipeline meet in their reductions. Where nothing tells them apart (no
jitter, no disturbance) one of them stands for all.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

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
    Schedule,
)
from ganglion.decide.simulator.disturbance import Disturbance, end_of
from ganglion.decide.simulator.links import Network
from ganglion.decide.simulator.result import MessageRow, Simulation, StepRow
from ganglion.decide.simulator.wires import LinkEnd, Wires
from ganglion.errors import LayoutError, ProtocolError

MakeSchedule = Callable[[int], Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What lies around the pipelines: replicas, wires and troubles."""

    num_replicas: int = 1
    network: Network | None = None
    disturbances: tuple[Disturbance, ...] = ()
    seed: int = 0


def simulate(
    make: MakeSchedule,
    times: Sequence[StageTimes],
    batches: Sequence[int],
    around: Surroundings | None = None,
) -> Simulation:
    """Run one schedule per rank over some batches and return what happened.

    `make(rank)` gives the schedule of a rank of the pipeline, `times` those of each stage. Raises
    ProtocolError, naming who waits, if the schedules come to a halt before they are done.
    """
    if not times:
        raise LayoutError("a pipeline of 0 stages has nothing to do; use 1 or more")
    around = around or Surroundings()
    num_replicas = num_simulated(times, around.num_replicas, around.disturbances)
    schedules = _opened(make, times, batches, num_replicas)
    with _collector_resting():
        rows, messages = _Driver(schedules, times, around).run()
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
    """Return how many replicas are simulated: one, if nothing tells them apart."""
    alike = not disturbances and not any(stage.jitter for stage in times)
    return 1 if alike else num_replicas


@contextmanager
def _collector_resting() -> Iterator[None]:
    """Keep the garbage collector from searching rows that are all in use; it costs a fifth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _opened(
    make: MakeSchedule, times: Sequence[StageTimes], batches: Sequence[int], num_replicas: int
) -> list[Schedule]:
    """Make the schedules of all replicas and let all batches enter."""
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


# When a message came, whether it is a gradient, and the message: of two that came in one moment the
# activation counts as first, as a scan over (activation, gradient) finds it first.
_Arrival = tuple[float, bool, Message]
_arrival = itemgetter(0, 1)


class _Driver:
    """The state of one simulation; `place` counts the simulated ranks, replica by replica."""

    def __init__(
        self, schedules: list[Schedule], times: Sequence[StageTimes], around: Surroundings
    ) -> None:
        self._schedules = schedules
        stage_map = schedules[0].stage_map
        self._num_ranks, self._num_stages = stage_map.num_ranks, stage_map.num_stages
        self._num_replicas = len(schedules) // self._num_ranks
        self._noise = random.Random(around.seed)
        self._jitter = [stage.jitter for stage in times]
        self._base_s = _base_times(times, schedules[0].splits_backward)
        self._disturbed = _by_place(around.disturbances, len(schedules))
        self._is_steady = not any(self._jitter) and not around.disturbances
        self._computing = [False] * len(schedules)
        self._inbox: list[list[_Arrival]] = [[] for _ in schedules]
        self._heap: list[tuple[float, int, int, StepRow | Message | LinkEnd]] = []
        self._num_pushed = 0
        self._rows: list[StepRow] = []
        self._messages: list[MessageRow] = []
        self._wires = Wires(times, around.network, self._num_replicas, self._push, self._messages)
        self._rank_of = [stage_map.rank_of(stage) for stage in range(self._num_stages)]

    def run(self) -> tuple[list[StepRow], list[MessageRow]]:
        heap, pop, start_all = self._heap, heapq.heappop, self._start_all
        computing, inbox, schedules = self._computing, self._inbox, self._schedules
        for place in range(len(schedules)):
            start_all(place, 0.0)
        while heap:
            now_s, _, place, event = pop(heap)
            if type(event) is Message:
                if computing[place]:
                    inbox[place].append((now_s, event.kind != FORWARD, event))
                    continue
                schedules[place].on_arrival(event)
            elif type(event) is LinkEnd:
                self._wires.on_link_end(now_s, event)
                continue
            else:
                self._finish(place, event)  # type: ignore[arg-type]
            start_all(place, now_s)
        self._check_done()
        return self._rows, self._messages

    def _check_done(self) -> None:
        stuck = [place for place, schedule in enumerate(self._schedules) if not schedule.done]
        if stuck:
            raise ProtocolError(f"stages {stuck} wait for messages that nobody will send")

    def _start_all(self, place: int, now_s: float) -> None:
        schedule = self._schedules[place]
        if self._inbox[place]:
            self._read_inbox(place, schedule)
        while (action := schedule.next()) is not None:
            if action.kind == REDUCE:
                self._wires.reduce(now_s, place, action)
                continue
            version = action.index
            if action.lane == COMPUTE:
                self._computing[place] = True
                version = schedule.version_of(version)
            if self._is_steady:
                end_s = now_s + self._base_s[action.stage][action.kind]
            else:
                end_s = self._end_s(place, action, now_s)
            self._push(end_s, place, (action, now_s, end_s, version, place))

    def _read_inbox(self, place: int, schedule: Schedule) -> None:
        """Hand over what came; a rank that computes reads its mail when it is through."""
        inbox = self._inbox[place]
        if len(inbox) > 1:
            inbox.sort(key=_arrival)
        for _, _, message in inbox:
            schedule.on_arrival(message)
        inbox.clear()

    def _finish(self, place: int, row: StepRow) -> None:
        self._rows.append(row)
        action, _, end_s, version, _ = row
        self._schedules[place].on_finish(action)
        if action.lane != COMPUTE:
            return
        self._computing[place] = False
        kind = action.kind
        if kind != WEIGHT:
            stage = action.stage + (1 if kind == FORWARD else -1)
            if 0 <= stage < self._num_stages:
                target = place - place % self._num_ranks + self._rank_of[stage]
                message = Message(kind, stage, action.index, version)
                self._wires.send(end_s, message, action.stage, place, target)

    def _push(self, time_s: float, place: int, event: StepRow | Message | LinkEnd) -> None:
        # The running number decides between events of one moment, so that runs are repeatable.
        heapq.heappush(self._heap, (time_s, self._num_pushed, place, event))
        self._num_pushed += 1

    def _end_s(self, place: int, action: Action, now_s: float) -> float:
        stage = action.stage
        work_s = self._base_s[stage][action.kind]
        if action.lane == COMPUTE:
            if self._jitter[stage]:
                work_s *= self._noise.lognormvariate(0.0, self._jitter[stage])
            if self._disturbed[place]:
                return end_of(work_s, now_s, self._disturbed[place])
        return now_s + work_s


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


def _by_place(disturbances: Sequence[Disturbance], num_places: int) -> list[list[Disturbance]]:
    by_place: list[list[Disturbance]] = [[] for _ in range(num_places)]
    for disturbance in disturbances:
        if not 0 <= disturbance.rank < num_places:
            raise LayoutError(
                f"a disturbance was asked for rank {disturbance.rank}, but ranks go from 0 to "
                f"{num_places - 1}"
            )
        by_place[disturbance.rank].append(disturbance)
    return by_place
