"""Every layout that a question allows, as plans without times: only what divides.

Sizes of axes are factors of the number of ranks. An axis of tensor parallelism must divide the
parameters that it splits, and heads; data and z must divide the batch; stages need blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from ganglion.decide.planner.question import Question
from ganglion.decide.shapes import DescribedModel, ModelShape, Parameter, describe_shape
from ganglion.decide.topology import DEFAULT_RANK_ORDER, Mesh
from ganglion.errors import LayoutError

PIPE_INSIDE = ("x", "y", "z", "pipe", "data")
# Schedules to try, with the chunks of a rank. The others are tried where they are fixed: GPipe is
# never faster than 1F1B and keeps more, and stashing keeps a version for each stage.
_SCHEDULES: tuple[tuple[str, int], ...] = (
    ("one_f_one_b", 0),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zero_bubble", 0),
    ("zero_bubble_v", 0),
    ("message_driven", 0),
    ("two_bw", 0),
)
_MOST_MICROBATCH = 64


class Layout(NamedTuple):
    """The sizes of the axes, and the samples of a microbatch."""

    data: int
    pipe: int
    x: int
    y: int
    z: int
    microbatch_size: int
    num_microbatches: int


class Pipelining(NamedTuple):
    """A schedule, its chunks a rank, and how ranks are numbered."""

    schedule: str
    chunks: int
    rank_order: tuple[str, ...]


def layouts(question: Question) -> Iterator[Layout]:
    """Yield the axes and microbatches that divide the ranks, the model and the batch."""
    splits = TensorSplits(question.shape)
    for pipe, x, y, z, data in _factorizations(question):
        if pipe > question.shape.num_blocks or not splits.fits(x, y, z):
            continue
        samples, rest = divmod(question.global_batch_size, data * z)
        if rest:
            continue
        for size in _microbatches(question, samples):
            yield Layout(data, pipe, x, y, z, size, samples // size)


def rank_orders(question: Question, layout: Layout) -> list[tuple[str, ...]]:
    """Return the orders of ranks that make a difference to a layout."""
    both = layout.pipe > 1 and layout.data > 1
    orders = (DEFAULT_RANK_ORDER, PIPE_INSIDE) if both else (DEFAULT_RANK_ORDER,)
    return [order for order in question.allowed("rank_order", *orders) if isinstance(order, tuple)]


def schedules(question: Question, layout: Layout) -> Iterator[tuple[str, int]]:
    """Yield the schedules that can run a layout, with the chunks of a rank."""
    names = [str(n) for n in question.allowed("schedule", *(name for name, _ in _SCHEDULES))]
    if layout.pipe == 1:
        # Without stages all flushing schedules are one loop.
        flushing = [name for name in names if name not in ("two_bw", "stash")]
        yield (flushing or names)[0], 0
        return
    tried = [*_SCHEDULES, *((name, 0) for name in names if name not in dict(_SCHEDULES))]
    for name, chunks in tried:
        if name not in names or not _runs(name, layout):
            continue
        if name == "interleaved" and chunks not in question.allowed("chunks", chunks):
            continue
        if _num_stages(name, chunks, layout) <= question.shape.num_blocks:
            yield name, chunks


def _runs(name: str, layout: Layout) -> bool:
    """Return whether a batch has the microbatches that a schedule needs."""
    if name == "interleaved":
        return layout.num_microbatches % layout.pipe == 0
    return layout.num_microbatches >= layout.pipe if name == "two_bw" else True


def _num_stages(name: str, chunks: int, layout: Layout) -> int:
    return layout.pipe * (chunks or (2 if name == "zero_bubble_v" else 1))


def _factorizations(question: Question) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (pipe, x, y, z, data) whose product is the number of ranks."""
    divisors = [n for n in range(1, question.num_ranks + 1) if question.num_ranks % n == 0]
    free = [
        [int(str(size)) for size in question.allowed(axis, *divisors)]
        for axis in ("pipe", "x", "y", "z")
    ]
    wanted = question.fixed.get("data")
    for pipe, x in product(free[0], free[1]):
        if question.num_ranks % (pipe * x):
            continue
        for y, z in product(free[2], free[3]):
            data, rest = divmod(question.num_ranks, pipe * x * y * z)
            if data and not rest and (wanted is None or data in wanted):
                yield pipe, x, y, z, data


def _microbatches(question: Question, samples: int) -> list[int]:
    powers = [2**n for n in range(_MOST_MICROBATCH.bit_length())]
    sizes = (int(str(size)) for size in question.allowed("microbatch_size", *powers))
    return [size for size in sizes if samples % size == 0]


class TensorSplits:
    """Which tensor axes a model fits."""

    def __init__(self, shape: ModelShape) -> None:
        """Collect what the axes must divide: different parameters, and sizes such as heads."""
        described = shape if isinstance(shape, DescribedModel) else describe_shape(shape)
        blocks = {id(block.parameters): block.parameters for block in described.blocks}
        self._parameters: list[Parameter] = [p for block in blocks.values() for p in block]
        self._sizes = described.splits
        self.fits = cache(self._fits)

    def _fits(self, x: int, y: int, z: int) -> bool:
        """Return whether the axes divide what they split; a model without splits has no axes."""
        parts = {"x": x, "y": y}
        known = {split.axis for split in self._sizes}
        if not known.issuperset(axis for axis, size in parts.items() if size > 1):
            return False
        if (z > 1 and not known) or any(one.size % parts.get(one.axis, 1) for one in self._sizes):
            return False
        try:
            mesh = Mesh(x=x, y=y, z=z)
            whole = sum(parameter.num_gathered(mesh) for parameter in self._parameters)
        except LayoutError:
            return False
        # If z divides little of what is stored, ranks along it hold the same.
        return sum(p.num_stored(mesh) for p in self._parameters) < 2 * whole / z
