"""A chain: blocks that run one after another, each with random numbers of its own, then the loss.

The forward of a stage and that of a whole model, part after part: a segment that is computed
again in backward is one, as a node; what lies between segments keeps its activations, block by
block. The last part has the loss in it, so that its output need not be kept.

    blocks      0   1   2   3   4   5
    segments       [1   2] [3]             parts: 0, [1 2], [3], 4, 5 + loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ganglion.execute.offload import ActivationOffload, Hooks, SavedTensors
from ganglion.execute.pipeline.blocks.recompute import RecomputedSegment
from ganglion.execute.pipeline.blocks.weight_gradients import Deferral, WeightStore

LossFn = Callable[[Tensor, Tensor], Tensor]
Seed = Callable[[int], None]  # (block): make the random numbers those of a block
Context = Callable[[], AbstractContextManager[object]]
# How a block is run; what takes tensors that autograd saves, if anything does, goes with it.
Call = Callable[[nn.Module, Tensor, Hooks | None], Tensor]


def plain_call(block: nn.Module, hidden: Tensor, hooks: Hooks | None = None) -> Tensor:
    """Return what a block makes of its input, with its own parameters; saved as it comes."""
    output: Tensor = block(hidden)
    return output


@dataclass(frozen=True, slots=True)
class _Part:
    """Some blocks, by their numbers in the model; as one node, if they are computed again."""

    numbers: range
    segment: RecomputedSegment | None


class Chain:
    """Some blocks in order; the loss function is given where the model ends."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        first_block: int = 0,
        loss_fn: LossFn | None = None,
        autocast: Context = nullcontext,
        segments: Sequence[range] = (),
        deferral: Deferral | None = None,
        call: Call = plain_call,
        offload: ActivationOffload | None = None,
    ) -> None:
        """Hold `blocks`, of which the first is block `first_block` of the model.

        `segments` are the runs of blocks, by their numbers in the model, that backward computes
        again as one each. What autograd saves of a forward goes to `offload`, if there is one.
        """
        self.blocks = list(blocks)
        self._first_block = first_block
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._deferral = deferral
        self._call = call
        self._offload = offload
        self._parts = list(self._cut(segments))

    def forward(
        self, hidden: Tensor, target: Tensor | None, seed: Seed, half: WeightStore | None = None
    ) -> Tensor:
        """Return the output or, at the end of the model, the loss against `target`.

        With a deferral, the weight halves of the backward will go to `half`.
        """
        with self._saving(hidden, target, half) as saved:
            if any(part.segment for part in self._parts):
                return self._forward_parts(hidden, target, seed, half, saved)
            with self._collecting(half), self._autocast():
                hidden = self._run(self._numbers, hidden, seed, saved)
            return self._end(hidden, target)

    @torch.no_grad()
    def evaluate(self, hidden: Tensor, target: Tensor | None) -> Tensor:
        """Return the output or the loss, and remember nothing."""
        with self._autocast():
            for block in self.blocks:
                hidden = self._call(block, hidden, None)
        return self._end(hidden, target)

    def _forward_parts(
        self,
        hidden: Tensor,
        target: Tensor | None,
        seed: Seed,
        half: WeightStore | None,
        saved: SavedTensors | None,
    ) -> Tensor:
        def forward_of(numbers: range, saved: SavedTensors | None) -> Callable[[Tensor], Tensor]:
            def forward(hidden: Tensor) -> Tensor:
                # Autocast by part: what it casts and caches without a graph must not be used with.
                with self._collecting(half), self._autocast():
                    output = self._run(numbers, hidden, seed, saved)
                return output if numbers.stop < self._numbers.stop else self._end(output, target)

            return forward

        anchors = () if half is None else (half.anchor,)
        for part in self._parts:
            forward = forward_of(part.numbers, None if part.segment else saved)
            if part.segment is None:
                hidden = forward(hidden)
                continue
            if saved is not None:
                saved.begin_part()
            hidden = part.segment.run(forward, hidden, anchors)
        return hidden

    def _run(
        self, numbers: range, hidden: Tensor, seed: Seed, saved: SavedTensors | None = None
    ) -> Tensor:
        for number in numbers:
            if saved is not None:
                saved.begin_part()
            seed(number)
            hooks = None if saved is None else saved.hooks
            hidden = self._call(self.blocks[number - self._first_block], hidden, hooks)
        return hidden

    def _end(self, hidden: Tensor, target: Tensor | None) -> Tensor:
        if self._loss_fn is None or target is None:
            return hidden
        return self._loss_fn(hidden, target)

    @contextmanager
    def _saving(
        self, hidden: Tensor, target: Tensor | None, half: WeightStore | None
    ) -> Iterator[SavedTensors | None]:
        """Yield what takes saved tensors, part by part, if anything does."""
        if self._offload is None:
            yield None
            return
        modules = [*self.blocks, *([self._loss_fn] if isinstance(self._loss_fn, nn.Module) else [])]
        data = [t for t in (hidden, target) if t is not None and not t.requires_grad]
        # Weight halves read their inputs long after the input halves of their part.
        saved = self._offload.saved_tensors(modules, data, ahead=half is None)
        with saved.saving():
            yield saved

    def _collecting(self, half: WeightStore | None) -> AbstractContextManager[object]:
        if half is None:
            return nullcontext()
        assert self._deferral is not None, "weight halves are collected by a deferral"
        return self._deferral.collecting(half)

    @property
    def _numbers(self) -> range:
        return range(self._first_block, self._first_block + len(self.blocks))

    def _cut(self, segments: Sequence[range]) -> Iterator[_Part]:
        """Yield the parts: segments, and every other block by itself."""
        starts = {span.start: span for span in segments}
        number = self._numbers.start
        while number < self._numbers.stop:
            span = starts.get(number, range(number, number + 1))
            assert span.stop <= self._numbers.stop, "a segment ends with its stage"
            yield _Part(span, self._recomputed(span) if number in starts else None)
            number = span.stop

    def _recomputed(self, span: range) -> RecomputedSegment:
        modules = [self.blocks[number - self._first_block] for number in span]
        if span.stop == self._numbers.stop and isinstance(self._loss_fn, nn.Module):
            modules.append(self._loss_fn)
        one = f"block {span.start}"
        return RecomputedSegment(
            one if len(span) == 1 else f"{one} to {span.stop - 1}".replace("block", "blocks"),
            modules,
        )
