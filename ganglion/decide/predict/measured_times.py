"""What each stage of a real pipeline costs: medians of its trace, as the simulator wants them.

A computation counts with the handing over of its result, which the engine does inside it; so a
message is under way from the end of that. Who computes reads its mail later: only messages that
somebody sat waiting for show how long one takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from ganglion.decide.costs import StageTimes
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import StageMap
from ganglion.errors import DataError
from ganglion.trace import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    UPDATE,
    WEIGHT,
    Event,
    Interval,
    common,
    match_messages,
    merged,
    total_s,
)

_TIMED = (FORWARD, BACKWARD, WEIGHT, UPDATE)


def measured_times(events: Sequence[Event], plan: Plan, stage_map: StageMap) -> list[StageTimes]:
    """Return the times of every stage; raises DataError if the trace lacks one."""
    lengths: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if event.kind in _TIMED:
            lengths[event.kind, event.stage].append(event.duration_s)
    medians = {key: median(found) for key, found in lengths.items()}
    latencies, sizes = _messages(events)
    reductions = _reductions(events, plan, stage_map) if plan.data > 1 else {}
    times = []
    for stage in range(stage_map.num_stages):
        if (FORWARD, stage) not in medians or (BACKWARD, stage) not in medians:
            raise DataError(f"the trace of its first steps lacks stage {stage}")
        times.append(
            StageTimes(
                forward_s=medians[FORWARD, stage],
                backward_s=medians[BACKWARD, stage],
                weight_s=medians.get((WEIGHT, stage), 0.0),
                update_s=medians.get((UPDATE, stage), 0.0),
                reduce_s=reductions.get(stage_map.rank_of(stage), 0.0) / stage_map.num_chunks,
                latency_s=latencies.get(stage, 0.0),
                message_bytes=sizes.get(stage, 0),
            )
        )
    return times


def computing(events: Iterable[Event]) -> dict[int, list[Interval]]:
    """Return by rank when it ran stages; evaluation is no part of a step."""
    found: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if event.lane == COMPUTE and event.kind in _TIMED:
            found[event.rank].append((event.start_s, event.end_s))
    return {rank: merged(intervals) for rank, intervals in found.items()}


def _messages(events: Sequence[Event]) -> tuple[dict[int, float], dict[int, int]]:
    """Return latency and bytes of the messages over each boundary, by the stage before it."""
    busy = computing(events)
    awaited: dict[int, list[float]] = defaultdict(list)
    taken: dict[int, list[float]] = defaultdict(list)
    sizes: dict[int, list[int]] = defaultdict(list)
    for send, receive in match_messages(events):
        hop = receive.stage - 1 if receive.kind == "receive_forward" else receive.stage
        begin_s, end_s = send.end_s, max(send.end_s, receive.end_s)
        sizes[hop].append(send.bytes)
        taken[hop].append(end_s - begin_s)
        if not common(busy.get(receive.rank, []), [(begin_s, end_s)]):
            awaited[hop].append(end_s - begin_s)
    # Where nobody ever waited, the quickest of all is the nearest to what a message takes.
    latencies = {hop: median(awaited[hop]) if awaited[hop] else min(taken[hop]) for hop in taken}
    return latencies, {hop: int(median(found)) for hop, found in sizes.items()}


def _reductions(events: Iterable[Event], plan: Plan, stage_map: StageMap) -> dict[int, float]:
    """Return by pipe coordinate how long the gradients of a step are summed over the replicas.

    Whoever comes first waits for the others; the last to come shows what the sum itself takes.
    """
    mesh = plan.mesh()
    parts: dict[tuple[int, int, int], list[Interval]] = defaultdict(list)
    for event in events:
        if event.kind == REDUCE:
            pipe = mesh.coordinates(event.rank).pipe
            parts[pipe, event.step, event.rank].append((event.start_s, event.end_s))
    quickest: dict[tuple[int, int], float] = {}
    for (pipe, step, _), intervals in parts.items():
        took_s = total_s(merged(intervals))
        quickest[pipe, step] = min(took_s, quickest.get((pipe, step), took_s))
    return {
        pipe: median([took_s for (at, _), took_s in quickest.items() if at == pipe])
        for pipe in range(stage_map.num_ranks)
        if any(at == pipe for at, _ in quickest)
    }
