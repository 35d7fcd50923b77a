"""Replay: the same events give the same decisions, in the engine, the simulator and afterwards.

A schedule is a state machine without a clock. So what a real run decided follows from the order in
which its messages came and its actions ended, and can be decided again from a record of those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ganglion.execute.pipeline.build as assembling
from ganglion import Plan
from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import RankSchedule, planned_schedule
from ganglion.decide.schedules.pipeline.action import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    Action,
    Message,
)
from ganglion.decide.simulator import Simulation, simulate
from ganglion.execute.comm import Arrival, Faults, Header, run_threads
from ganglion.execute.pipeline import Engine
from ganglion.trace import Event, Recorder
from tests.support.pipelines import CASE, FLUSHING, plan_for
from tests.support.training import Case, train_traced

LISTED = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v")
DRIVEN = ("message_driven", "two_bw", "stash")
SMALL = dataclasses.replace(CASE, num_steps=3, global_batch_size=8)

# What a schedule was told, and what it answered to "next".
Log = list[tuple[str, Any]]


def logged(schedule: RankSchedule, log: Log) -> RankSchedule:
    """Let a schedule write down its events and decisions."""

    def watch(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*values: Any) -> Any:
            answer = call(*values)
            log.append((name, values[0] if values else answer))
            return answer

        return watched

    for name in ("admit", "next", "on_arrival", "on_finish"):
        setattr(schedule, name, watch(name, getattr(schedule, name)))
    return schedule


def replayed(schedule: RankSchedule, log: Log) -> list[Action | None]:
    """Return what a fresh schedule decides when it is told the same."""
    decided = []
    for name, value in log:
        if name == "next":
            decided.append(schedule.next())
        else:
            getattr(schedule, name)(value)
    return decided


def decisions(log: Log) -> list[Action | None]:
    return [value for name, value in log if name == "next"]


def trained(plan: Plan, case: Case, faults: Faults) -> list[list[Event]]:
    """Train with threads and return the trace of each rank."""

    found = run_threads(plan.mesh(), lambda world: train_traced(world, plan, case), faults=faults)
    return [events for _, events in found]


@pytest.mark.parametrize("schedule", [*LISTED, *DRIVEN])
@pytest.mark.parametrize("seed", [1, 2])
def test_recorded_events_give_the_same_decisions(
    schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: dict[int, Log] = {}

    def recording(mine: RankSchedule, *parts: Any, **more: Any) -> Engine:
        return Engine(logged(mine, logs.setdefault(mine.rank, [])), *parts, **more)

    monkeypatch.setattr(assembling, "Engine", recording)
    plan = plan_for(SMALL, schedule, 2, 1, 4)
    trained(plan, SMALL, Faults(seed=seed, delay_s=0.003, reorder=True))
    assert set(logs) == {0, 1}
    for rank, log in logs.items():
        actions = [action for action in decisions(log) if action is not None]
        assert {action.kind for action in actions} >= {"F", "B", "R", "U"}
        assert replayed(planned_schedule(plan, rank), log) == decisions(log)


# --- from a trace ------------------------------------------------------------------------------

_LETTERS = {"forward": "F", "backward": "B", "weight": "W", "update": "U"}


def entry(event: Event) -> tuple[float, Action | Message] | None:
    """Return when a schedule heard of an event, and what it was; None if it did not."""
    if event.kind.startswith("receive_"):
        kind = _LETTERS[event.kind.removeprefix("receive_")]
        return event.end_s, Message(kind, event.stage, event.microbatch, event.version)
    if event.kind in _LETTERS:
        index = event.step if event.kind == "update" else event.microbatch
        return event.start_s, Action(_LETTERS[event.kind], event.stage, index)
    return None


def check_against_trace(schedule: RankSchedule, events: list[Event]) -> int:
    """Let a schedule decide again; return how many actions it chose as the trace has them.

    A trace does not say when reductions ended: they end here when the schedule has nothing else.
    """
    begun: list[Action] = []
    reducing: list[Action] = []
    num_chosen = 0
    for _, what in sorted(e for e in map(entry, events) if e is not None):
        if isinstance(what, Message):
            schedule.on_arrival(what)
            continue
        while what not in begun:
            action = schedule.next()
            if action is None:
                assert reducing, f"{what} was run, but the schedule chose {begun or 'nothing'}"
                schedule.on_finish(reducing.pop(0))
            elif action.kind == REDUCE:
                reducing.append(action)
            else:
                begun.append(action)
        begun.remove(what)
        schedule.on_finish(what)
        num_chosen += 1
    return num_chosen


@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("seed", [3, 4])
def test_a_trace_holds_all_that_decisions_need(schedule: str, seed: int) -> None:
    plan = plan_for(SMALL, schedule, 2, 1, 4)
    traces = trained(plan, SMALL, Faults(seed=seed, delay_s=0.003))
    for rank, events in enumerate(traces):
        mine = planned_schedule(plan, rank)
        for _ in range(SMALL.num_steps):
            mine.admit(4)
        assert check_against_trace(mine, events) >= SMALL.num_steps * (4 * 2 + 1)


def test_another_order_than_the_recorded_is_noticed() -> None:
    plan = plan_for(SMALL, "message_driven", 2, 1, 4)
    events = trained(plan, SMALL, Faults(seed=3, delay_s=0.003))[0]
    mine = planned_schedule(plan, 0)
    for _ in range(SMALL.num_steps):
        mine.admit(4)
    swapped = [e._replace(microbatch={0: 1, 1: 0}.get(e.microbatch, e.microbatch)) for e in events]
    with pytest.raises(AssertionError, match="0F1 was run, but the schedule chose"):
        check_against_trace(mine, swapped)


# --- engine and simulator ----------------------------------------------------------------------


def computed(events: list[Event]) -> list[Action]:
    found = [entry(event) for event in events if event.kind in ("forward", "backward", "weight")]
    return [what for _, what in sorted(e for e in found if e) if isinstance(what, Action)]


def simulated(plan: Plan, batches: tuple[int, ...], times: list[StageTimes]) -> Simulation:
    return simulate(lambda rank: planned_schedule(plan, rank), times, batches)


@pytest.mark.parametrize(
    ("schedule", "pipe"),
    [*((name, 2) for name in LISTED), *((name, 3) for name in ("gpipe", "1f1b", "zero_bubble"))],
)
def test_listed_schedules_run_in_the_order_of_the_simulator(schedule: str, pipe: int) -> None:
    plan = plan_for(SMALL, schedule, pipe, 1, 4)
    num_stages = planned_schedule(plan, 0).stage_map.num_stages
    times = [StageTimes(forward_s=1, backward_s=1, weight_s=1)] * num_stages
    expected = simulated(plan, (4,) * SMALL.num_steps, times)
    for rank, events in enumerate(trained(plan, SMALL, Faults(seed=5, delay_s=0.003))):
        assert computed(events) == expected.order(rank)


class Idle:
    """A worker that computes nothing and counts."""

    def __init__(self) -> None:
        self.computed: list[Action] = []

    def forward(self, action: Action, version: int, hidden: Tensor | None) -> Tensor | None:
        self.computed.append(action)
        return torch.zeros(1)

    def backward(self, action: Action, version: int, gradient: Tensor | None) -> Tensor | None:
        self.computed.append(action)
        return torch.zeros(1)

    def weight(self, action: Action, version: int) -> None:
        self.computed.append(action)

    def start_reduce(self, action: Action) -> None:
        pass

    def is_reduced(self, action: Action) -> bool:
        return True

    def update(self, action: Action) -> None:
        pass

    def take(self, arrival: Arrival) -> bool:
        return False


class Scripted:
    """A transport that lets each message arrive after as many computations as it did elsewhere."""

    rank = 0
    peers = ()

    def __init__(self, script: list[tuple[int, Message]], worker: Idle) -> None:
        self._script = script
        self._worker = worker

    def post(self, target: int, kind: str, tensor: Tensor, **numbers: int) -> None:
        pass

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        if not self._script or self._script[0][0] > len(self._worker.computed):
            return None
        _, (kind, stage, microbatch, version) = self._script.pop(0)
        name = {FORWARD: "forward", BACKWARD: "backward"}[kind]
        header = Header(name, 0, stage, microbatch, version, (1,), torch.float32)
        return Arrival(0, header, torch.zeros(1))

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        arrival = self.poll()
        assert arrival is not None, f"awaits {awaiting}, which the simulator did not send by now"
        return arrival

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def script_of(log: Log) -> list[tuple[int, Message]]:
    """Return each message with how many computations had begun when the schedule heard of it."""
    num_begun, script = 0, []
    for name, value in log:
        if name == "next" and value is not None and value.lane == COMPUTE:
            num_begun += 1
        elif name == "on_arrival":
            script.append((num_begun, value))
    return script


@pytest.mark.parametrize("schedule", [*LISTED, *DRIVEN])
@pytest.mark.parametrize("seed", range(4))
def test_equal_arrivals_give_the_order_of_the_simulator(schedule: str, seed: int) -> None:
    """Message-driven schedules too: what they do is what came, whoever drives them."""
    plan, batches = plan_for(SMALL, schedule, 3, 1, 8), (8,) * 3
    num_stages = planned_schedule(plan, 0).stage_map.num_stages
    spread = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_stages, 4, generator=spread).tolist()
    times = [
        StageTimes(forward_s=1 + f, backward_s=1 + b, weight_s=1 + w, latency_s=latency)
        for f, b, w, latency in draws
    ]
    logs: dict[int, Log] = {}

    def make(rank: int) -> RankSchedule:
        logs[rank] = []
        return logged(planned_schedule(plan, rank), logs[rank])

    expected = simulate(make, times, batches)
    for rank in range(3):
        worker = Idle()
        transport = Scripted(script_of(logs[rank]), worker)
        mine = planned_schedule(plan, rank)
        engine = Engine(mine, transport, lambda stage: 0, worker, Recorder(0), 1.0)
        for size in batches:
            engine.admit(size)
        engine.run_until(len(batches))
        assert worker.computed == expected.order(rank)
        assert replayed(planned_schedule(plan, rank), logs[rank]) == decisions(logs[rank])
