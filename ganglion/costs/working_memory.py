"""What a rank holds beside parameters: activations of microbatches in flight, and what travels.

A tensor between two blocks is one piece of memory, whoever keeps it:

    without recomputation    |  kept  |  kept  |  kept  |     every microbatch in flight
    with                     o        o        o        o     inputs of blocks, every microbatch
                                      |  kept  |              the inside of one block, once

A stage of a pipeline also keeps its own input and output until the backward. (The general form of
PipeDream-2BW, spec A.9, and of AxoNN's equation 1, spec A.6, whose blocks need not be alike.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.costs.activations import FLOAT, HALF, BlockActivations
from ganglion.costs.memory import Memory
from ganglion.costs.parameters import Parameter
from ganglion.topology import Mesh

# The norm of a bucket is taken in fp64: two copies of it and their product.
NORM_BYTES = 3 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """The blocks of one stage; the first stage's input is data, the last one's output a loss.

    `num_waiting` inputs have come and wait for their forward.
    """

    blocks: Sequence[BlockActivations]
    is_first: bool = False
    is_last: bool = False
    num_waiting: int = 0

    def live_bytes(self, *, recompute: bool) -> int:
        """Return what one microbatch keeps from its forward to its backward."""
        inside = 0 if recompute else sum(block.kept_bytes for block in self.blocks)
        between = (
            after.input_bytes
            for before, after in pairwise(self.blocks)
            if recompute or before.keeps_output or after.keeps_input
        )
        return inside + sum(between) + self._input_bytes + self._output_bytes

    def message_bytes(self) -> int:
        """Return the inputs that wait, and the gradients of one microbatch that come and go."""
        waiting = self.num_waiting * self._input_bytes
        return waiting + self._input_bytes + self._output_bytes

    def recomputed_bytes(self) -> int:
        """Return the inside of the block that keeps most."""
        return max(
            block.kept_bytes + block.keeps_output * block.output_bytes for block in self.blocks
        )

    def scratch_bytes(self, *, recompute: bool) -> int:
        """Return the most that backward needs beyond what is kept, which it frees on its way.

        With recomputation, beyond `recomputed_bytes` too.
        """
        needed = freed = 0
        output_bytes = self._output_bytes  # a loss is but a number
        for block in reversed(self.blocks):
            if recompute:
                peak = self._rerun_bytes(block) + output_bytes
                keeps = block.input_bytes
            else:
                peak = block.scratch_bytes
                keeps = block.kept_bytes + block.keeps_input * block.input_bytes
            needed = max(needed, peak - freed)
            freed += keeps
            output_bytes = block.input_bytes
        return needed

    def _rerun_bytes(self, block: BlockActivations) -> int:
        """Return the peak of a block that runs again: its inside, or its weights' gradients."""
        peak = max(block.kept_bytes + block.scratch_bytes, block.rerun_bytes)
        return peak - self.recomputed_bytes()

    @property
    def _input_bytes(self) -> int:
        return 0 if self.is_first else self.blocks[0].input_bytes

    @property
    def _output_bytes(self) -> int:
        return 0 if self.is_last else self.blocks[-1].output_bytes


def activation_memory(
    stages: Sequence[StageBlocks], alive: Iterable[Sequence[int]], *, recompute: bool
) -> Memory:
    """Return the activations of a rank's stages at the worst of some moments.

    Each moment has the microbatches of every stage that are alive.
    """
    sizes = [stage.live_bytes(recompute=recompute) for stage in stages]
    moments = (
        sum(count * size for count, size in zip(moment, sizes, strict=True)) for moment in alive
    )
    return Memory(
        activations=max(moments),
        recomputed=max(stage.recomputed_bytes() for stage in stages) if recompute else 0,
        scratch=max(stage.scratch_bytes(recompute=recompute) for stage in stages),
    )


def with_norm(working: Memory, bucket_size: int, *, flushes: bool) -> Memory:
    """Return the same with room for the norm of a bucket of `bucket_size` elements.

    Where a pipeline flushes, activations are gone by then, so it may fit into their place.
    """
    freed = working.activations + working.recomputed if flushes else 0
    needed = NORM_BYTES * bucket_size - freed
    return replace(working, scratch=max(working.scratch, needed))


def message_memory(stages: Iterable[StageBlocks]) -> Memory:
    """Return what waits to be computed with or to be sent."""
    return Memory(communication=sum(stage.message_bytes() for stage in stages))


def gathered_memory(
    parameters: Sequence[Parameter],
    mesh: Mesh,
    *,
    keep_gathered: bool | Sequence[bool] = False,
    overlap: bool = True,
    precision: str = "fp32",
) -> Memory:
    """Return the blocks of weights that a rank gathers along z, and their gradients.

    A gradient of a block stays, with the rank's sum of it, until the next microbatch has one too.
    Gathered are the blocks that are kept (all, none, or those of `gathered_blocks` that are told),
    and of the others the one in use and, with overlap, the next.
    """
    used = [parameter for parameter in parameters if parameter.is_gathered(mesh)]
    blocks = [parameter.num_gathered(mesh) for parameter in used]
    pieces = sum(parameter.num_stored(mesh) for parameter in used)
    keeps = [keep_gathered] * len(used) if isinstance(keep_gathered, bool) else keep_gathered
    passing = [0 if kept else size for size, kept in zip(blocks, keeps, strict=True)]
    gathered = sum(blocks) - sum(passing)
    if overlap:
        gathered += max((a + b for a, b in pairwise([0, *passing])), default=0)
    else:
        gathered += max(passing, default=0)
    rounded = 0 if precision == "fp32" else max(blocks, default=0)
    return Memory(communication=FLOAT * (gathered + sum(blocks) + pieces) + HALF * rounded)


def gathered_blocks(parameters: Iterable[Parameter], mesh: Mesh) -> list[int]:
    """Return the bytes of each block that is gathered along z, in the order of the model."""
    return [FLOAT * p.num_gathered(mesh) for p in parameters if p.is_gathered(mesh)]
