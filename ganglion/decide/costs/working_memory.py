"""Memory of a rank beside parameters: activations of microbatches in flight, and messages.

A tensor between two blocks is one piece of memory, whichever of them keeps it:

    without recomputation    |  kept  |  kept  |  kept  |     every microbatch in flight
    with                     o        o        o        o     inputs of segments, every microbatch
                                      |  kept  |              the inside of one segment, once
    activations offloaded             |  kept  |  kept  |     two parts of one microbatch

A stage of a pipeline also keeps its own input and output until the backward, unless they are
offloaded. (The general form of PipeDream-2BW, spec A.9, and of AxoNN's equation 1, spec A.6, whose
blocks need not be alike.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.costs.memory import Memory
from ganglion.decide.shapes import FLOAT, HALF, BlockActivations, Parameter
from ganglion.decide.topology import Mesh

# The norm of a bucket is taken in fp64, part by part: a copy of each part, and its squares.
NORM_BYTES = 2 * 8
NORM_PART = 2**16  # elements


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment that is computed again as one, or one block that keeps its activations."""

    blocks: Sequence[BlockActivations]
    is_again: bool

    @property
    def input_bytes(self) -> int:
        return self.blocks[0].input_bytes

    @property
    def keeps_input(self) -> bool:
        return self.is_again or self.blocks[0].keeps_input

    @property
    def keeps_output(self) -> bool:
        return not self.is_again and self.blocks[-1].keeps_output

    @property
    def kept_bytes(self) -> int:
        """Bytes kept from forward to backward, without input and output."""
        return 0 if self.is_again else self._inside_bytes

    @property
    def again_bytes(self) -> int:
        """Bytes kept once the segment was computed again."""
        last = self.blocks[-1]
        whole = self._inside_bytes + last.keeps_output * last.output_bytes
        return whole if self.is_again else 0

    def peak_bytes(self, output_bytes: int) -> int:
        """Return the most that its backward needs beyond kept bytes."""
        if not self.is_again:
            return self.blocks[0].scratch_bytes
        return self._rerun_bytes(output_bytes) + output_bytes

    @property
    def _inside_bytes(self) -> int:
        return sum(block.kept_bytes for block in self.blocks) + sum(self._between)

    @property
    def _between(self) -> list[int]:
        """Bytes kept between its blocks."""
        return [
            after.input_bytes if before.keeps_output or after.keeps_input else 0
            for before, after in pairwise(self.blocks)
        ]

    def _rerun_bytes(self, output_bytes: int) -> int:
        """Its inside goes while the gradients of all its weights come; the most of both.

        The gradient of its output stays to the end, while blocks inside have one of their own.
        """
        left, made, peak = self.again_bytes, 0, 0
        for block, before in zip(reversed(self.blocks), [*reversed(self._between), 0], strict=True):
            peak = max(peak, left + made + block.scratch_bytes + block.held_bytes)
            left -= block.kept_bytes + before
            peak = max(peak, left + made + block.rerun_bytes)
            made += block.gradient_bytes + (0 if made else min(output_bytes, block.input_bytes))
        return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """The blocks of one stage; the first stage's input is data, the last one's output a loss.

    `segments` are the runs of its blocks, counted from 0, that are computed again as one each.
    `num_waiting` inputs have come and wait for their forward.
    """

    blocks: Sequence[BlockActivations]
    segments: Sequence[range] = ()
    is_first: bool = False
    is_last: bool = False
    num_waiting: int = 0

    def live_bytes(self) -> int:
        """Return the bytes that one microbatch keeps from forward to backward."""
        return sum(self._part_bytes()) + self._output_bytes

    def resident_bytes(self) -> int:
        """Return the bytes in memory if activations are offloaded: two parts at the worst."""
        kept = self._part_bytes()
        return max((a + b for a, b in pairwise(kept)), default=kept[0])

    def message_bytes(self) -> int:
        """Return the inputs that wait, and the gradients of one microbatch that come and go."""
        waiting = self.num_waiting * self._input_bytes
        return waiting + self._input_bytes + self._output_bytes

    def recomputed_bytes(self, *, offloaded: bool = False) -> int:
        """Return the inside of the segment that keeps most, unless it finds room that was freed."""
        most = max(part.again_bytes for part in self._parts())
        return min(most, self._needed_bytes(offloaded))

    def scratch_bytes(self, *, offloaded: bool = False) -> int:
        """Return the bytes that backward needs beyond recomputed and kept ones."""
        needed = self._needed_bytes(offloaded)
        return needed - self.recomputed_bytes(offloaded=offloaded)

    def _needed_bytes(self, offloaded: bool) -> int:
        """Return the most that backward needs beyond kept bytes, which it frees on its way.

        Offloaded, that is beyond `resident_bytes`.
        """
        needed = freed = 0
        output_bytes = self._output_bytes  # a loss is but a number
        parts, kept = list(self._parts()), self._part_bytes()
        for number, part in reversed(list(enumerate(parts))):
            if offloaded:
                freed = self.resident_bytes() - sum(kept[max(0, number - 1) : number + 1])
            needed = max(needed, part.peak_bytes(output_bytes) - freed)
            freed += part.kept_bytes + part.keeps_input * part.input_bytes
            output_bytes = part.input_bytes
        return needed

    def _part_bytes(self) -> list[int]:
        """Return the bytes that each part keeps of one microbatch, with its input."""
        parts = list(self._parts())
        inputs = [
            after.input_bytes if before.keeps_output or after.keeps_input else 0
            for before, after in pairwise(parts)
        ]
        ends = [self._input_bytes, *inputs]
        return [part.kept_bytes + end for part, end in zip(parts, ends, strict=True)]

    def _parts(self) -> Iterator[_Part]:
        spans = {span.start: span for span in self.segments}
        number = 0
        while number < len(self.blocks):
            span = spans.get(number, range(number, number + 1))
            yield _Part(self.blocks[span.start : span.stop], number in spans)
            number = span.stop

    @property
    def _input_bytes(self) -> int:
        return 0 if self.is_first else self.blocks[0].input_bytes

    @property
    def _output_bytes(self) -> int:
        return 0 if self.is_last else self.blocks[-1].output_bytes


def activation_memory(
    stages: Sequence[StageBlocks], alive: Iterable[Sequence[int]], *, offloaded: bool = False
) -> Memory:
    """Return the activations of a rank's stages at the worst of some moments.

    Each moment has the microbatches of every stage that are alive. What is offloaded lies on a
    lower tier, but for the parts in use.
    """
    sizes = [stage.live_bytes() for stage in stages]
    kept = max(
        sum(count * size for count, size in zip(moment, sizes, strict=True)) for moment in alive
    )
    resident = max(stage.resident_bytes() for stage in stages) if offloaded else kept
    return Memory(
        activations=min(resident, kept),
        recomputed=max(stage.recomputed_bytes(offloaded=offloaded) for stage in stages),
        scratch=max(stage.scratch_bytes(offloaded=offloaded) for stage in stages),
        lower_tier=kept if offloaded else 0,
    )


def with_norm(working: Memory, bucket_size: int, *, flushes: bool) -> Memory:
    """Return the same with room for the norm of a bucket of `bucket_size` elements.

    Where a pipeline flushes, activations are gone by then, so it may fit into their place.
    """
    freed = working.activations + working.recomputed if flushes else 0
    needed = NORM_BYTES * min(bucket_size, NORM_PART) - freed
    return replace(working, scratch=max(working.scratch, needed))


def message_memory(stages: Iterable[StageBlocks]) -> Memory:
    """Return the memory of tensors that wait to be used or to be sent."""
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
    Gathered are the blocks that are kept (all, none, or a flag for each of `gathered_blocks`),
    and of the others the one in use and, with overlap, the next.
    """
    blocks = _gathered_sizes(parameters, mesh)
    pieces = sum(blocks) // mesh.z
    keeps = [keep_gathered] * len(blocks) if isinstance(keep_gathered, bool) else keep_gathered
    passing = [0 if kept else size for size, kept in zip(blocks, keeps, strict=True)]
    gathered = sum(blocks) - sum(passing)
    if overlap:
        gathered += max((a + b for a, b in pairwise([0, *passing])), default=0)
    else:
        gathered += max(passing, default=0)
    rounded = max(blocks, default=0) if precision == "bf16" else 0
    size = stored_bytes(precision)
    return Memory(communication=size * (gathered + sum(blocks) + pieces) + HALF * rounded)


def gathered_blocks(
    parameters: Iterable[Parameter], mesh: Mesh, precision: str = "fp32"
) -> list[int]:
    """Return the bytes of each block that is gathered along z, in the order of the model."""
    size = stored_bytes(precision)
    return [size * count for count in _gathered_sizes(list(parameters), mesh)]


def _gathered_sizes(parameters: Sequence[Parameter], mesh: Mesh) -> list[int]:
    """Return the elements of each block that is gathered; those of layers alike are one."""
    known = {id(one): one for one in parameters}
    sizes = {key: one.num_gathered(mesh) for key, one in known.items() if one.is_gathered(mesh)}
    return [sizes[id(one)] for one in parameters if id(one) in sizes]


def stored_bytes(precision: str) -> int:
    """Return the bytes of an element of a weight as it is stored."""
    return HALF if precision.endswith("_master") else FLOAT
