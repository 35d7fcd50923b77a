"""The result of a simulation: rows of plain numbers; steps, events and figures are made on demand.

The hot loop only appends tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from ganglion.decide.schedules.pipeline import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    UPDATE,
    WEIGHT,
    Action,
    Message,
    StageMap,
    Step,
    peak_live,
    versions_kept,
)
from ganglion.trace import COMM, NONE, Event, Interval, common, merged, total_s

_KINDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHT: "weight",
    REDUCE: "reduce",
    UPDATE: "update",
}
_MESSAGE_KINDS = {
    FORWARD: ("send_forward", "receive_forward"),
    BACKWARD: ("send_backward", "receive_backward"),
}


# A `sim_rank` counts the simulated ranks, replica by replica.
# An action: action, start, end, version, sim_rank.
StepRow = tuple[Action, float, float, int, int]
# A message: message, bytes, sim_rank of source and target, start, end of sending, arrival.
MessageRow = tuple[Message, int, int, int, float, float, float]

GlobalRank = Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """The computations of a rank, their span, and the waits for communication alone."""

    compute_s: float
    first_s: float
    last_s: float
    waits_s: float


def _rank_use(computed: list[Interval], waited: list[Interval]) -> RankUse:
    busy = merged(computed)
    waiting = merged(waited)
    return RankUse(
        compute_s=total_s(busy),
        first_s=busy[0][0],
        last_s=busy[-1][1],
        waits_s=total_s(waiting) - total_s(common(waiting, busy)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened, in order of the ends; `num_replicas` is 1 where all replicas are alike."""

    stage_map: StageMap
    batches: tuple[int, ...]
    num_replicas: int
    rows: list[StepRow]
    messages: list[MessageRow]

    @property
    def makespan_s(self) -> float:
        """When the last action ended."""
        return max(end_s for _, _, end_s, _, _ in self.rows)

    @property
    def num_ranks(self) -> int:
        """How many ranks were simulated."""
        return self.stage_map.num_ranks * self.num_replicas

    def steps(self, replica: int = 0) -> list[Step]:
        """Return the actions of one replica, in order of their ends."""
        first = replica * self.stage_map.num_ranks
        sim_ranks = range(first, first + self.stage_map.num_ranks)
        return [
            Step(action, start_s, end_s, version)
            for action, start_s, end_s, version, sim_rank in self.rows
            if sim_rank in sim_ranks
        ]

    def order(self, rank: int) -> list[Action]:
        """Return the computations of a rank of the first replica, in order of their starts."""
        mine = [row for row in self.rows if row[4] == rank and row[0].lane == COMPUTE]
        return [row[0] for row in sorted(mine, key=lambda row: row[1])]

    def bubble(self) -> float:
        """Return 1 - work / cost, where cost is the longest span of computation of any rank.

        Spans run from a rank's first start to its last end (2401.10241, table 5), so the time in
        which the pipeline fills up to a rank does not count.
        """
        first_s, last_s = [float("inf")] * self.num_ranks, [0.0] * self.num_ranks
        work_s = [0.0] * self.num_ranks
        for action, start_s, end_s, _, sim_rank in self.rows:
            if action.lane == COMPUTE:
                first_s[sim_rank] = min(first_s[sim_rank], start_s)
                last_s[sim_rank] = max(last_s[sim_rank], end_s)
                work_s[sim_rank] += end_s - start_s
        cost_s = max(last - first for first, last in zip(first_s, last_s, strict=True))
        return 1 - max(work_s) / cost_s if cost_s else 0.0

    def uses(self) -> list[RankUse]:
        """Return what each rank of the first replica did with its time."""
        num_ranks = self.stage_map.num_ranks
        computed: list[list[Interval]] = [[] for _ in range(num_ranks)]
        waited: list[list[Interval]] = [[] for _ in range(num_ranks)]
        for action, start_s, end_s, _, sim_rank in self.rows:
            if sim_rank < num_ranks:
                if action.lane == COMPUTE:
                    computed[sim_rank].append((start_s, end_s))
                elif action.kind == REDUCE:
                    waited[sim_rank].append((start_s, end_s))
        for _, _, _, target, start_s, _, arrival_s in self.messages:
            if target < num_ranks:
                waited[target].append((start_s, arrival_s))
        return [_rank_use(*both) for both in zip(computed, waited, strict=True)]

    def num_versions(self) -> int:
        """Return the most weight versions any stage kept at once."""
        return max(versions_kept(self.steps()).values())

    def peak_live(self) -> list[int]:
        """Return the peak of live stages x microbatches of each rank of the first replica."""
        return peak_live(self.stage_map, self.steps())

    def events(self, global_rank: GlobalRank = lambda sim_rank: sim_rank) -> list[Event]:
        """Return the trace that a real run would have written, sorted by start."""
        ranks = [global_rank(sim_rank) for sim_rank in range(self.num_ranks)]
        steps = [step for step, size in enumerate(self.batches) for _ in range(size)]
        events = [_step_event(row, ranks, steps) for row in self.rows]
        for flow, row in enumerate(self.messages):
            events += _message_events(flow, row, ranks, steps)
        events.sort(key=_by_start)
        return events


_by_start = attrgetter("start_s", "end_s", "rank")


def _step_event(row: StepRow, ranks: list[int], steps: list[int]) -> Event:
    action, start_s, end_s, version, sim_rank = row
    computes = action.lane == COMPUTE
    return Event(
        rank=ranks[sim_rank],
        lane=action.lane,
        kind=_KINDS[action.kind],
        start_s=start_s,
        end_s=end_s,
        step=steps[action.index] if computes else action.index,
        stage=action.stage,
        microbatch=action.index if computes else NONE,
        version=version,
        axis="data" if action.kind == REDUCE else "",
    )


def _message_events(
    flow: int, row: MessageRow, ranks: list[int], steps: list[int]
) -> tuple[Event, Event]:
    message, num_bytes, source, target, start_s, sent_s, arrival_s = row
    kind, stage, microbatch, version = message
    sent, received = _MESSAGE_KINDS[kind]
    send = Event(
        rank=ranks[source],
        lane=COMM,
        kind=sent,
        start_s=start_s,
        end_s=sent_s,
        step=steps[microbatch],
        stage=stage - 1 if kind == FORWARD else stage + 1,
        microbatch=microbatch,
        version=version,
        bytes=num_bytes,
        flow=flow,
    )
    return send, send._replace(
        rank=ranks[target], kind=received, start_s=sent_s, end_s=arrival_s, stage=stage
    )
