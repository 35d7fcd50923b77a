"""The laws that every schedule obeys, checked on recorded steps, and a rehearsal that records them.

1  each microbatch goes forward once and backward once on every stage (and W once, if split)
2  inputs precede use: activations from the stage before, gradients from the stage behind
3  forward and backward of a microbatch use the same version, and it exists by then
4  live microbatches stay within the declared bound
5  weight versions in use stay within the declared bound
6  a batch is reduced after all its backwards, and updated after its reduction, in order
7  everything admitted ends

A rehearsal runs all ranks of a pipeline without clock and costs: every action takes one beat,
messages none. It shows before any launch that a schedule neither waits for ever nor breaks a law,
at least in that order of events.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ganglion.decide.schedules.pipeline.action import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    LANES,
    REDUCE,
    UPDATE,
    WEIGHT,
    Action,
    Message,
)
from ganglion.decide.schedules.pipeline.schedule import RankSchedule, StageMap
from ganglion.errors import ConfigError, GanglionError


class LawBroken(AssertionError):
    """A schedule broke a law."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action as it was run."""

    action: Action
    start_s: float
    end_s: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The batches that schedules were given, and the bounds they declared, rank by rank."""

    stage_map: StageMap
    batches: tuple[int, ...]
    live_bounds: tuple[int | None, ...]
    version_bounds: tuple[int, ...]
    splits_backward: bool = False

    @classmethod
    def of(cls, schedules: Sequence[RankSchedule], batches: Sequence[int]) -> Case:
        """Return the case of schedules that have admitted these batches."""
        return cls(
            stage_map=schedules[0].stage_map,
            batches=tuple(batches),
            live_bounds=tuple(schedule.live_bound for schedule in schedules),
            version_bounds=tuple(schedule.version_bound for schedule in schedules),
            splits_backward=schedules[0].splits_backward,
        )


def check_laws(case: Case, steps: Iterable[Step]) -> None:
    """Raise LawBroken, naming the action, if the steps break a law."""
    run: Run = {}
    for step in steps:
        _require(step.action not in run, f"{step.action} ran twice")
        run[step.action] = step
    _check_complete(case, run)
    _check_inputs(case, run)
    for stage in range(case.stage_map.num_stages):
        _check_versions(stage, case, run)
        _check_updates(stage, case, run)
    _check_bounds(case, run)


Run = dict[Action, Step]


def _check_complete(case: Case, run: Run) -> None:
    computed = (FORWARD, BACKWARD, WEIGHT) if case.splits_backward else (FORWARD, BACKWARD)
    total, stages = sum(case.batches), range(case.stage_map.num_stages)
    wanted = {Action(kind, s, k) for kind in computed for s in stages for k in range(total)}
    batches = range(len(case.batches))
    wanted |= {Action(kind, s, t) for kind in (REDUCE, UPDATE) for s in stages for t in batches}
    missing = wanted - set(run)
    _require(not missing, f"{min(map(str, missing), default='')} never ran")
    extra = [str(a) for a in run if a not in wanted]
    _require(not extra, f"{extra[:1]} was not asked for")


def _check_inputs(case: Case, run: Run) -> None:
    for k in range(sum(case.batches)):
        for stage in range(case.stage_map.num_stages):
            forward, backward = run[Action(FORWARD, stage, k)], run[Action(BACKWARD, stage, k)]
            _require(forward.end_s <= backward.start_s, f"{backward.action} ran before its forward")
            if case.splits_backward:
                weight = run[Action(WEIGHT, stage, k)]
                _require(backward.end_s <= weight.start_s, f"{weight.action} ran too early")
            if stage:
                before = run[Action(FORWARD, stage - 1, k)]
                _require(before.end_s <= forward.start_s, f"{forward.action} had no input")
                behind = run[Action(BACKWARD, stage - 1, k)]
                _require(backward.end_s <= behind.start_s, f"{behind.action} had no gradient")


def _check_versions(stage: int, case: Case, run: Run) -> None:
    for k in range(sum(case.batches)):
        forward, last = run[Action(FORWARD, stage, k)], run[Action(_end_kind(case), stage, k)]
        backward = run[Action(BACKWARD, stage, k)]
        same = forward.version == backward.version == last.version
        _require(same, f"{backward.action} changed its version")
        if forward.version:
            made = run[Action(UPDATE, stage, forward.version - 1)]
            _require(made.end_s <= forward.start_s, f"{forward.action} used weights not made yet")


def _check_updates(stage: int, case: Case, run: Run) -> None:
    first, newest_s = 0, 0.0
    for batch, size in enumerate(case.batches):
        ids = range(first, first + size)
        last_s = max(run[Action(_end_kind(case), stage, k)].end_s for k in ids)
        reduce, update = run[Action(REDUCE, stage, batch)], run[Action(UPDATE, stage, batch)]
        _require(last_s <= reduce.start_s, f"{reduce.action} ran before its last backward")
        _require(reduce.end_s <= update.start_s, f"{update.action} ran before its reduction")
        _require(newest_s <= update.start_s, f"{update.action} overtook the update before it")
        first, newest_s = first + size, update.end_s


def _end_kind(case: Case) -> str:
    """Return the kind of action that ends a microbatch on a stage."""
    return WEIGHT if case.splits_backward else BACKWARD


def _check_bounds(case: Case, run: Run) -> None:
    peaks = peak_live(case.stage_map, run.values())
    for rank, (live, bound) in enumerate(zip(peaks, case.live_bounds, strict=True)):
        _require(bound is None or live <= bound, f"rank {rank}: {live} live > {bound}")
    for stage, kept in versions_kept(run.values()).items():
        limit = case.version_bounds[case.stage_map.rank_of(stage)]
        _require(kept <= limit, f"stage {stage}: {kept} versions kept > {limit}")


# At the same time, ends come before new versions, and those before starts.
_ENDS, _MADE, _BEGINS = 0, 1, 2


def versions_kept(steps: Iterable[Step]) -> dict[int, int]:
    """Return the most versions each stage kept: those of live microbatches, and the newest."""
    changes: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    steps = list(steps)
    end = _last_kind(steps)
    for step in steps:
        mine = changes[step.action.stage]
        if step.action.kind == FORWARD:
            mine.append((step.start_s, _BEGINS, step.version))
        elif step.action.kind == end:
            mine.append((step.end_s, _ENDS, step.version))
        elif step.action.kind == UPDATE:
            mine.append((step.end_s, _MADE, step.action.index + 1))
    return {stage: _most_versions(sorted(mine)) for stage, mine in changes.items()}


def _most_versions(changes: list[tuple[float, int, int]]) -> int:
    live: Counter[int] = Counter()
    newest, most = 0, 1
    for _, change, version in changes:
        newest = version if change == _MADE else newest
        live[version] += change - 1
        if live[version] == 0:
            del live[version]
        most = max(most, len(live) + (newest not in live))
    return most


def peak_live(stage_map: StageMap, steps: Iterable[Step]) -> list[int]:
    """Return the peak of live stages x microbatches of each rank.

    Live: from the start of the forward to the end of the backward, or of W if it is split.
    """
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    steps = list(steps)
    end = _last_kind(steps)
    ranks = [stage_map.rank_of(stage) for stage in range(stage_map.num_stages)]
    for step in steps:
        if step.action.kind == FORWARD:
            changes[ranks[step.action.stage]].append((step.start_s, 1))
        elif step.action.kind == end:
            changes[ranks[step.action.stage]].append((step.end_s, -1))
    return [_peak(sorted(changes[rank])) for rank in range(stage_map.num_ranks)]


def _peak(changes: list[tuple[float, int]]) -> int:
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _last_kind(steps: Iterable[Step]) -> str:
    return WEIGHT if any(step.action.kind == WEIGHT for step in steps) else BACKWARD


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise LawBroken(message)


def rehearse(
    make: Callable[[int], RankSchedule], num_ranks: int, batches: Sequence[int], name: str
) -> None:
    """Raise ConfigError if a schedule breaks a law or fails; `name` is the user's name for it."""
    try:
        check_rehearsal(make, num_ranks, batches)
    except LawBroken as broken:
        raise ConfigError(
            f"{name} breaks a law of schedules with {num_ranks} ranks and {batches[0]} "
            f"microbatches: {broken}; draw it with `ganglion schedule` to see where"
        ) from broken
    except GanglionError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} failed with {num_ranks} ranks and {batches[0]} microbatches: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_rehearsal(
    make: Callable[[int], RankSchedule], num_ranks: int, batches: Sequence[int]
) -> None:
    """Run the batches and raise LawBroken, naming the action, if a law does not hold."""
    schedules = [make(rank) for rank in range(num_ranks)]
    for schedule in schedules:
        for size in batches:
            schedule.admit(size)
        schedule.stop_admitting()
    most = schedules[0].stage_map.num_stages * (3 * sum(batches) + 2 * len(batches))
    check_laws(Case.of(schedules, batches), _run(schedules, most))


def _run(schedules: Sequence[RankSchedule], most: int) -> list[Step]:
    """Return the steps of all ranks; in a beat all start what they can, then everything ends.

    Stop after `most` actions, which is more than there are: then some run over and over.
    """
    steps: list[Step] = []
    stage_map = schedules[0].stage_map
    beat, started = 0, _start(schedules)
    while started and len(steps) <= most:
        for rank, action, version in started:
            steps.append(Step(action, beat, beat + 1, version))
            schedules[rank].on_finish(action)
        for _, action, version in started:
            stage = action.stage + {FORWARD: 1, BACKWARD: -1}.get(action.kind, 0)
            if stage != action.stage and 0 <= stage < stage_map.num_stages:
                message = Message(action.kind, stage, action.index, version)
                schedules[stage_map.rank_of(stage)].on_arrival(message)
        beat, started = beat + 1, _start(schedules)
    return steps


def _start(schedules: Sequence[RankSchedule]) -> list[tuple[int, Action, int]]:
    """Return (rank, action, version) of every action that starts now."""
    started = []
    for rank, schedule in enumerate(schedules):
        for _ in LANES:
            action = schedule.next()
            if action is None:
                break
            version = schedule.version_of(action.index) if action.lane == COMPUTE else 0
            started.append((rank, action, version))
    return started
