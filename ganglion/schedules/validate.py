"""The laws that every schedule obeys, checked on what a driver recorded.

1  each microbatch goes forward once and backward once on every stage
2  inputs precede use: the stage before has sent, the stage behind has answered
3  forward and backward of a microbatch use the same version, and it exists by then
4  live microbatches stay within the declared bound
5  weight versions in use stay within the declared bound
6  a batch is reduced after all its backwards, and updated after its reduction
7  everything admitted ends
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ganglion.schedules.action import BACKWARD, FORWARD, REDUCE, UPDATE, Action


class LawBroken(AssertionError):
    """A schedule did what no schedule may do."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action as it was run."""

    action: Action
    start_s: float
    end_s: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What was asked of the schedules, and what they declared."""

    num_stages: int
    batches: tuple[int, ...]
    live_bounds: tuple[int | None, ...]
    version_bounds: tuple[int, ...]


def check_laws(case: Case, steps: Iterable[Step]) -> None:
    """Raise LawBroken, naming the action, if what was run breaks a law."""
    by_action = {}
    for step in steps:
        _require(step.action not in by_action, f"{step.action} ran twice")
        by_action[step.action] = step
    total = sum(case.batches)
    for stage in range(case.num_stages):
        _check_complete(stage, total, len(case.batches), by_action)
    _check_inputs(case.num_stages, total, by_action)
    for stage in range(case.num_stages):
        _check_versions(stage, total, by_action)
        _check_updates(stage, case.batches, by_action)
        _check_live(stage, case, by_action)


Run = dict[Action, Step]


def _check_complete(stage: int, total: int, num_batches: int, run: Run) -> None:
    wanted = {Action(kind, stage, k) for kind in (FORWARD, BACKWARD) for k in range(total)}
    wanted |= {Action(kind, stage, t) for kind in (REDUCE, UPDATE) for t in range(num_batches)}
    missing = wanted - set(run)
    _require(not missing, f"{min(map(str, missing), default='')} never ran")
    extra = [a for a in run if a.stage == stage and a not in wanted]
    _require(not extra, f"{extra[:1]} was not asked for")


def _check_inputs(num_stages: int, total: int, run: Run) -> None:
    for k in range(total):
        for stage in range(num_stages):
            forward, backward = run[Action(FORWARD, stage, k)], run[Action(BACKWARD, stage, k)]
            _require(forward.end_s <= backward.start_s, f"{backward.action} ran before its forward")
            if stage:
                before = run[Action(FORWARD, stage - 1, k)]
                _require(before.end_s <= forward.start_s, f"{forward.action} had no input")
                behind = run[Action(BACKWARD, stage - 1, k)]
                _require(backward.end_s <= behind.start_s, f"{behind.action} had no gradient")


def _check_versions(stage: int, total: int, run: Run) -> None:
    for k in range(total):
        forward, backward = run[Action(FORWARD, stage, k)], run[Action(BACKWARD, stage, k)]
        _require(forward.version == backward.version, f"{backward.action} changed its version")
        if forward.version:
            made = run[Action(UPDATE, stage, forward.version - 1)]
            _require(made.end_s <= forward.start_s, f"{forward.action} used weights not made yet")


def _check_updates(stage: int, batches: Sequence[int], run: Run) -> None:
    first = 0
    for batch, size in enumerate(batches):
        last_s = max(run[Action(BACKWARD, stage, k)].end_s for k in range(first, first + size))
        reduce, update = run[Action(REDUCE, stage, batch)], run[Action(UPDATE, stage, batch)]
        _require(last_s <= reduce.start_s, f"{reduce.action} ran before its last backward")
        _require(reduce.end_s <= update.start_s, f"{update.action} ran before its reduction")
        first += size


def _check_live(stage: int, case: Case, run: Run) -> None:
    mine = [step for step in run.values() if step.action.stage == stage]
    live, bound = peak_live(case.num_stages, mine)[stage], case.live_bounds[stage]
    _require(bound is None or live <= bound, f"stage {stage}: {live} live > {bound}")
    kept, limit = versions_kept(stage, mine), case.version_bounds[stage]
    _require(kept <= limit, f"stage {stage}: {kept} versions kept > {limit}")


def versions_kept(stage: int, steps: Iterable[Step]) -> int:
    """Return the most versions a stage kept: those of live microbatches, and the newest."""
    changes: list[tuple[float, int, int]] = []
    for step in steps:
        if step.action.stage != stage:
            continue
        # At one moment, what ends goes before what is made, and that before what begins.
        if step.action.kind == FORWARD:
            changes.append((step.start_s, 2, step.version))
        elif step.action.kind == BACKWARD:
            changes.append((step.end_s, 0, step.version))
        elif step.action.kind == UPDATE:
            changes.append((step.end_s, 1, step.action.index + 1))
    live: Counter[int] = Counter()
    newest, most = 0, 1
    for _, change, version in sorted(changes):
        newest = version if change == 1 else newest
        live[version] += change - 1  # a forward begins: +1, a backward ends: -1
        most = max(most, len({v for v, count in live.items() if count} | {newest}))
    return most


def peak_live(num_stages: int, steps: Iterable[Step]) -> list[int]:
    """Return the most live microbatches each stage ever had."""
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for step in steps:
        if step.action.kind == FORWARD:
            changes[step.action.stage].append((step.start_s, 1))
        elif step.action.kind == BACKWARD:
            changes[step.action.stage].append((step.end_s, -1))
    peaks = []
    for stage in range(num_stages):
        live = peak = 0
        for _, change in sorted(changes[stage]):
            live += change
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise LawBroken(message)
