"""Which blocks are computed again in backward, and how many of them as one.

A segment keeps its input alone. Longer segments keep fewer inputs, but more is computed again, and
so alive, at once. With N blocks in all and G stages, each with G microbatches in flight:

    kept at the worst ~ G * N / (G * length) + 1 + length = N / length + 1 + length

which is least at length = sqrt(N). AxoNN takes the divisor of N / G closest to it (spec A.6,
equation 1). Ours are blocks, halves of a layer, with embedding and head among them, and stages need
not be alike. So a stage is cut into as many segments as bring their mean length closest to sqrt(N),
lengths that differ by one at most: AxoNN's own, wherever a divisor is the closest.

Under a budget as little as possible is computed again: blocks are taken in the order of the bytes
they free for each flop they cost. Computing a large block again needs much memory at once, so the
same is tried without the largest blocks, without the next, and so on. Where single blocks do not
suffice, all blocks are computed again in segments: fewer inputs are kept then. A budget of
`Choice.num_bytes` of the choice that is returned when nothing fits, fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ganglion.decide.costs.working_memory import StageBlocks, activation_memory
from ganglion.decide.plan import Plan


def num_near_root(num_stage_blocks: int, num_blocks: int) -> int:
    """Return into how many segments the square-root rule cuts a stage of a model; a tie: more."""
    root = math.sqrt(num_blocks)
    counts = range(num_stage_blocks, 0, -1)
    return min(counts, key=lambda count: abs(num_stage_blocks / count - root))


def segments(plan: Plan, stage: range, num_blocks: int) -> tuple[range, ...]:
    """Return the runs of blocks that a stage, a run itself, computes again as one; in order."""
    match plan.recompute:
        case "full":
            return _by_length(stage, plan.recompute_every or 1)
        case "sqrt":
            return _by_count(stage, num_near_root(len(stage), num_blocks))
        case "blocks":
            return _inside(stage, plan.recompute_spans())
        case _:
            return ()


def written(spans: Sequence[range]) -> tuple[str, ...]:
    """Return segments as `Plan.recompute_blocks` has them: "3", "4-6"."""
    return tuple(str(s.start) if len(s) == 1 else f"{s.start}-{s.stop - 1}" for s in spans)


def _by_length(stage: range, length: int) -> tuple[range, ...]:
    starts = range(stage.start, stage.stop, length)
    return tuple(range(start, min(start + length, stage.stop)) for start in starts)


def _by_count(stage: range, count: int) -> tuple[range, ...]:
    """Cut a stage into equal parts; of lengths that differ by one, the longer come first."""
    short, num_long = divmod(len(stage), count)
    found, start = [], stage.start
    for number in range(count):
        stop = start + short + (number < num_long)
        found.append(range(start, stop))
        start = stop
    return tuple(found)


def _inside(stage: range, spans: Sequence[range]) -> tuple[range, ...]:
    """Return the parts of some segments that lie in a stage."""
    cut = (range(max(s.start, stage.start), min(s.stop, stage.stop)) for s in spans)
    return tuple(span for span in cut if span)


# --- a budget of bytes ---------------------------------------------------------------------------


Spans = tuple[range, ...]
_Index = tuple[int, int]  # stage of the rank, block of the stage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks:
    """The stages of one rank, the cost of each block's forward, and microbatches alive."""

    stages: Sequence[StageBlocks]
    costs: Sequence[Sequence[float]]
    alive: Sequence[Sequence[int]]
    offloaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Segments of each stage, the bytes of activations they leave, and their cost."""

    segments: tuple[Spans, ...]
    num_bytes: int
    cost: float


def choose_recomputed(rank: RankBlocks, budget_bytes: float) -> Choice:
    """Return the cheapest choice within a budget or, if there is none, the smallest."""
    nothing = _choice(rank, ())
    if nothing.num_bytes <= budget_bytes:
        return nothing
    singles = list(_single_blocks(rank, budget_bytes))
    fitting = [choice for choice in singles if choice.num_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda choice: (choice.cost, choice.num_bytes))
    found = [*singles, *_whole_segments(rank)]
    fitting = [choice for choice in found if choice.num_bytes <= budget_bytes]
    return fitting[0] if fitting else min(found, key=lambda choice: choice.num_bytes)


def _single_blocks(rank: RankBlocks, budget_bytes: float) -> Iterator[Choice]:
    """Yield, for every size of blocks to be left alone, as few of the others as fit, and all."""
    order = _by_worth(rank)
    sizes = {rank.stages[stage].blocks[place].kept_bytes for stage, place in order}
    for most in sorted(sizes):
        taken = [(s, b) for s, b in order if rank.stages[s].blocks[b].kept_bytes <= most]

        def fits(count: int, taken: Sequence[_Index] = taken) -> bool:
            return _choice(rank, taken[:count]).num_bytes <= budget_bytes

        count = bisect_left(range(len(taken)), True, key=fits)
        yield _choice(rank, taken[:count])
        yield _choice(rank, taken)


def _by_worth(rank: RankBlocks) -> list[_Index]:
    """Return blocks that keep something, those first that free most bytes for each flop."""
    most_alive = [max(moment[stage] for moment in rank.alive) for stage in range(len(rank.stages))]

    def worth(place: _Index) -> float:
        stage, number = place
        freed = rank.stages[stage].blocks[number].kept_bytes * most_alive[stage]
        cost = rank.costs[stage][number]
        return freed / cost if cost else math.inf

    stages = enumerate(rank.stages)
    places = [(s, b) for s, stage in stages for b, one in enumerate(stage.blocks) if one.kept_bytes]
    return sorted(places, key=worth, reverse=True)


def _whole_segments(rank: RankBlocks) -> Iterator[Choice]:
    """Yield everything computed again, in segments of 2, 3 and more, up to about a root."""
    longest = max(len(stage.blocks) for stage in rank.stages)
    most_alive = max(max(moment) for moment in rank.alive)
    for length in range(2, min(longest, math.isqrt(longest * most_alive) + 1) + 1):
        spans = tuple(_by_length(range(len(stage.blocks)), length) for stage in rank.stages)
        yield _priced(rank, spans)


def _choice(rank: RankBlocks, taken: Sequence[_Index]) -> Choice:
    chosen: list[list[range]] = [[] for _ in rank.stages]
    for stage, number in sorted(taken):
        chosen[stage].append(range(number, number + 1))
    return _priced(rank, tuple(map(tuple, chosen)))


def _priced(rank: RankBlocks, spans: tuple[Spans, ...]) -> Choice:
    stages = [replace(s, segments=mine) for s, mine in zip(rank.stages, spans, strict=True)]
    held = activation_memory(stages, rank.alive, offloaded=rank.offloaded)
    pairs = zip(rank.costs, spans, strict=True)
    cost = sum(costs[number] for costs, mine in pairs for span in mine for number in span)
    return Choice(segments=spans, num_bytes=held.activations + held.recomputed, cost=cost)
