"""Zero bubble: a backward in two halves; the half that no other stage waits for fills the gaps.

B computes the gradient of the inputs, which the stage before needs; W those of the weights, which
only the update needs (2401.10241). ZB-H1 keeps 1F1B's order and memory and delays W behind B by the
number of the stage, so the last stages run theirs while the pipeline drains:

    3 stages, 4 microbatches
    stage 0   F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
    stage 2   F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

ZB-V folds the model: rank r holds stages r and 2p - 1 - r, so the last stage sits beside the first
and its gradients return at once. With equal F, B and W no rank idles between its first forward and
its last W, at the memory of 1F1B.
"""

from __future__ import annotations

from ganglion.decide.schedules.pipeline.action import BACKWARD, FORWARD, WEIGHT
from ganglion.decide.schedules.pipeline.listed import Entry, ListedSchedule
from ganglion.decide.schedules.pipeline.schedule import StageMap


class ZeroBubble(ListedSchedule):
    """ZB-H1: one stage per rank; as many live microbatches (from F to W) as 1F1B's first stage."""

    splits_backward = True

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, StageMap(num_stages))

    def _list(self, num_microbatches: int) -> list[Entry]:
        stage, lag = self.rank, self.rank
        num_ahead = min(self.stage_map.num_ranks - stage, num_microbatches)
        order = [(FORWARD, stage, k) for k in range(num_ahead)]
        for k in range(num_microbatches):
            order.append((BACKWARD, stage, k))
            if k >= lag:
                order.append((WEIGHT, stage, k - lag))
            if k + num_ahead < num_microbatches:
                order.append((FORWARD, stage, k + num_ahead))
        left = range(max(0, num_microbatches - lag), num_microbatches)
        return order + [(WEIGHT, stage, k) for k in left]

    @property
    def live_bound(self) -> int | None:
        """The number of stages: a late stage holds the microbatches whose W is delayed."""
        return self.stage_map.num_ranks


class ZeroBubbleV(ListedSchedule):
    """ZB-V: two stages per rank, the second half of the model folded back over the first.

    The published list is for at least 2p - 1 microbatches; with fewer, those that do not exist are
    left out, which only removes dependencies.
    """

    splits_backward = True

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, StageMap(num_ranks, 2, folded=True))

    def _list(self, num_microbatches: int) -> list[Entry]:
        num_ranks = self.stage_map.num_ranks
        count = max(num_microbatches, 2 * num_ranks - 1)
        order = _fold(self.rank, num_ranks, count)
        down, up = self.stage_map.stages_of(self.rank)
        return [
            (kind, up if folded else down, k) for kind, folded, k in order if k < num_microbatches
        ]

    @property
    def live_bound(self) -> int | None:
        """Two per rank: the activation memory of 1F1B's first stage."""
        return 2 * self.stage_map.num_ranks


_DOWN = ((FORWARD, False), (BACKWARD, False), (WEIGHT, False))
_UP = ((FORWARD, True), (BACKWARD, True), (WEIGHT, True))


def _fold(rank: int, num_ranks: int, count: int) -> list[tuple[str, bool, int]]:
    """Return the order of a rank as (kind, whether on the way up, microbatch)."""
    down_f, down_b, down_w = _DOWN
    up_f, up_b, up_w = _UP
    behind = num_ranks - rank
    pattern = [down_f] * (2 * behind - 1) + [up_f, down_f] * rank + [up_f, up_b, up_w] * behind
    pattern += [*_DOWN, *_UP] * (count - num_ranks)
    pattern += [down_b, up_b] * rank + [down_b, down_w] * behind
    pattern += [up_w] * count + [down_w] * count
    done = dict.fromkeys((*_DOWN, *_UP), 0)
    order = []
    for kind, folded in pattern:
        number = done[kind, folded]
        done[kind, folded] += 1
        if number < count:
            order.append((kind, folded, number))
    return order
