"""Which blocks of a stage are computed again in backward, and how many of them as one.

A segment keeps its input alone. Longer segments keep fewer inputs, but more is computed again, and
so alive, at once. With N blocks in all and G stages, each with G microbatches in flight:

    kept at the worst ~ G * N / (G * length) + 1 + length = N / length + 1 + length

which is least at length = sqrt(N). AxoNN takes the divisor of N / G closest to it (spec A.6,
equation 1). Ours are blocks, halves of a layer, with embedding and head among them, and stages need
not be alike. So a stage is cut into as many segments as bring their mean length closest to sqrt(N),
lengths that differ by one at most: AxoNN's own, wherever a divisor is the closest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """Cut into equal parts; of lengths that differ by one, the longer come first."""
    short, num_long = divmod(len(stage), count)
    found, start = [], stage.start
    for number in range(count):
        stop = start + short + (number < num_long)
        found.append(range(start, stop))
        start = stop
    return tuple(found)


def _inside(stage: range, spans: Sequence[range]) -> tuple[range, ...]:
    """Return what of some segments lies in a stage: they end where it ends."""
    cut = (range(max(s.start, stage.start), min(s.stop, stage.stop)) for s in spans)
    return tuple(span for span in cut if span)
