"""A chain: blocks that run one after another, each with random numbers of its own, then the loss.

The forward of a stage and that of a whole model. With recomputation every block is a node that
runs again in backward; the last one has the loss in it, so that its output need not be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ganglion.pipeline.recompute import RecomputedBlock
from ganglion.pipeline.weight_gradients import Deferral, WeightStore

LossFn = Callable[[Tensor, Tensor], Tensor]
Seed = Callable[[int], None]  # (block): make the random numbers those of a block
Context = Callable[[], AbstractContextManager[object]]
Call = Callable[[nn.Module, Tensor], Tensor]  # how a block is run


def plain_call(block: nn.Module, hidden: Tensor) -> Tensor:
    """Return what a block makes of its input, with its own parameters."""
    output: Tensor = block(hidden)
    return output


class Chain:
    """Some blocks in order; the loss function is given where the model ends."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        first_block: int = 0,
        loss_fn: LossFn | None = None,
        autocast: Context = nullcontext,
        recompute: bool = False,
        deferral: Deferral | None = None,
        call: Call = plain_call,
    ) -> None:
        """Hold `blocks`, of which the first is block `first_block` of the model."""
        self.blocks = list(blocks)
        self._first_block = first_block
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._deferral = deferral
        self._call = call
        numbered = range(first_block, first_block + len(self.blocks)) if recompute else ()
        self._recomputed = [self._recomputed_block(number) for number in numbered]

    def forward(
        self, hidden: Tensor, target: Tensor | None, seed: Seed, half: WeightStore | None = None
    ) -> Tensor:
        """Return the output or, at the end of the model, the loss against `target`.

        With a deferral, the weight halves of the backward will go to `half`.
        """
        if self._recomputed:
            return self._forward_blocks(hidden, target, seed, half)
        with self._collecting(half), self._autocast():
            for number, block in enumerate(self.blocks, start=self._first_block):
                seed(number)
                hidden = self._call(block, hidden)
        return self._end(hidden, target)

    @torch.no_grad()
    def evaluate(self, hidden: Tensor, target: Tensor | None) -> Tensor:
        """Return the output or the loss, and remember nothing."""
        with self._autocast():
            for block in self.blocks:
                hidden = self._call(block, hidden)
        return self._end(hidden, target)

    def _forward_blocks(
        self, hidden: Tensor, target: Tensor | None, seed: Seed, half: WeightStore | None
    ) -> Tensor:
        def forward_of(number: int) -> Callable[[Tensor], Tensor]:
            def forward(hidden: Tensor) -> Tensor:
                # Autocast by block: what it casts and caches without a graph must not be used with.
                with self._collecting(half), self._autocast():
                    seed(self._first_block + number)
                    output = self._call(self.blocks[number], hidden)
                return output if number < len(self.blocks) - 1 else self._end(output, target)

            return forward

        anchors = () if half is None else (half.anchor,)
        for number, block in enumerate(self._recomputed):
            hidden = block.run(forward_of(number), hidden, anchors)
        return hidden

    def _end(self, hidden: Tensor, target: Tensor | None) -> Tensor:
        if self._loss_fn is None or target is None:
            return hidden
        return self._loss_fn(hidden, target)

    def _collecting(self, half: WeightStore | None) -> AbstractContextManager[object]:
        if self._deferral is None or half is None:
            return nullcontext()
        return self._deferral.collecting(half)

    def _recomputed_block(self, number: int) -> RecomputedBlock:
        place = number - self._first_block
        modules = [self.blocks[place]]
        if place == len(self.blocks) - 1 and isinstance(self._loss_fn, nn.Module):
            modules.append(self._loss_fn)
        return RecomputedBlock(f"block {number}", modules)
