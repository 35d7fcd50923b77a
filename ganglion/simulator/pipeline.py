"""A pipeline on a virtual clock: the second driver of the schedules, beside the engine.

One heap holds what will happen: the end of an action, or the arrival of a message. After each, the
rank it happened on is asked for what it starts now.

    pop (time, rank, event) -> on_finish / on_arrival -> next(), next(), ... -> push their ends
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ganglion.costs import StageTimes
from ganglion.errors import LayoutError, ProtocolError
from ganglion.schedules.action import BACKWARD, COMPUTE, FORWARD, REDUCE, UPDATE, Action, Message
from ganglion.schedules.schedule import Schedule
from ganglion.schedules.validate import Step, peak_live, versions_kept
from ganglion.trace import Event
from ganglion.trace.event import NONE

MakeSchedule = Callable[[int], Schedule]
_KINDS = {FORWARD: "forward", BACKWARD: "backward", REDUCE: "reduce", UPDATE: "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened, in order of the ends."""

    num_stages: int
    steps: tuple[Step, ...]

    @property
    def makespan_s(self) -> float:
        """When the last action ended."""
        return max(step.end_s for step in self.steps)

    def order(self, stage: int) -> list[Action]:
        """Return a stage's computations in the order they were started."""
        mine = [s for s in self.steps if s.action.stage == stage and s.action.lane == COMPUTE]
        return [step.action for step in sorted(mine, key=lambda step: step.start_s)]

    def bubble(self) -> float:
        """Return 1 - work / cost, where cost is the longest span of computation of any stage.

        The definition of 2401.10241 (table 5): spans run from a stage's first start to its last
        end, so the fill of the pipeline in front of a stage does not count.
        """
        spans, works = [], []
        for stage in range(self.num_stages):
            mine = [s for s in self.steps if s.action.stage == stage and s.action.lane == COMPUTE]
            spans.append(max(s.end_s for s in mine) - min(s.start_s for s in mine))
            works.append(sum(s.end_s - s.start_s for s in mine))
        return 1 - max(works) / max(spans)

    def events(self) -> list[Event]:
        """Return the trace a real run of this pipeline would have written, one rank a stage."""
        return [_event(step) for step in self.steps]

    def num_versions(self) -> int:
        """Return the most weight versions any stage kept at once."""
        return max(versions_kept(stage, self.steps) for stage in range(self.num_stages))

    def peak_live(self) -> list[int]:
        """Return the most live microbatches each stage ever had."""
        return peak_live(self.num_stages, self.steps)


def _event(step: Step) -> Event:
    action = step.action
    computes = action.lane == COMPUTE
    return Event(
        rank=action.stage,
        lane=action.lane,
        kind=_KINDS[action.kind],
        start_s=step.start_s,
        end_s=step.end_s,
        stage=action.stage,
        microbatch=action.index if computes else NONE,
        step=NONE if computes else action.index,
        version=step.version,
    )


def simulate(
    make: MakeSchedule, times: Sequence[StageTimes], batches: Sequence[int], *, seed: int = 0
) -> Simulation:
    """Run one schedule per stage over some batches and return what happened.

    Raises ProtocolError, naming who waits, if the schedules come to a halt before they are done.
    """
    if not times:
        raise LayoutError("a pipeline of 0 stages has nothing to do; use 1 or more")
    return _Driver(make, times, batches, random.Random(seed)).run()


class _Driver:
    """The state of one simulation."""

    def __init__(
        self,
        make: MakeSchedule,
        times: Sequence[StageTimes],
        batches: Sequence[int],
        noise: random.Random,
    ) -> None:
        self._times = times
        self._noise = noise
        self._schedules = [make(stage) for stage in range(len(times))]
        for schedule in self._schedules:
            for size in batches:
                schedule.admit(size)
            schedule.stop_admitting()
        self._heap: list[tuple[float, int, int, Step | Message]] = []
        self._num_pushed = 0
        self._steps: list[Step] = []

    def run(self) -> Simulation:
        for rank in range(len(self._schedules)):
            self._start_all(rank, 0.0)
        while self._heap:
            now_s, _, rank, event = heapq.heappop(self._heap)
            if isinstance(event, Message):
                self._schedules[rank].on_arrival(event)
            else:
                self._finish(rank, event)
            self._start_all(rank, now_s)
        stuck = [rank for rank, schedule in enumerate(self._schedules) if not schedule.done]
        if stuck:
            raise ProtocolError(f"stages {stuck} wait for messages that nobody will send")
        return Simulation(num_stages=len(self._schedules), steps=tuple(self._steps))

    def _start_all(self, rank: int, now_s: float) -> None:
        schedule = self._schedules[rank]
        while (action := schedule.next()) is not None:
            version = schedule.version_of(action.index) if action.lane == COMPUTE else action.index
            step = Step(action, now_s, now_s + self._duration_s(rank, action), version)
            self._push(step.end_s, rank, step)

    def _finish(self, rank: int, step: Step) -> None:
        self._steps.append(step)
        self._schedules[rank].on_finish(step.action)
        target = {FORWARD: rank + 1, BACKWARD: rank - 1}.get(step.action.kind, -1)
        if 0 <= target < len(self._schedules):
            message = Message(step.action.kind, target, step.action.index, step.version)
            self._push(step.end_s + self._times[rank].latency_s, target, message)

    def _push(self, time_s: float, rank: int, event: Step | Message) -> None:
        # The running number decides between events of one moment, so that runs are repeatable.
        heapq.heappush(self._heap, (time_s, self._num_pushed, rank, event))
        self._num_pushed += 1

    def _duration_s(self, rank: int, action: Action) -> float:
        times = self._times[rank]
        if action.lane != COMPUTE:
            return times.reduce_s if action.kind == REDUCE else times.update_s
        base_s = times.forward_s if action.kind == FORWARD else times.backward_s
        return base_s * self._noise.lognormvariate(0.0, times.jitter) if times.jitter else base_s
