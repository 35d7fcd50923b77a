"""Cutting a model into stages: which blocks each stage holds, and which parameters two share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from ganglion.decide.costs import balanced_boundaries
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import StageMap
from ganglion.errors import LayoutError
from ganglion.execute.models import named_parameters, tied_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a model: the names of the blocks of each, and the parameters that several hold.

    `holders` gives, for each parameter that several stages hold, those stages, by its serial name.
    """

    stages: tuple[tuple[str, ...], ...]
    holders: Mapping[str, tuple[int, ...]]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first block of each stage but the first."""
        return tuple(self.first_block(stage) for stage in range(1, len(self.stages)))

    def first_block(self, stage: int) -> int:
        """Return the number of a stage's first block in the model."""
        return sum(len(names) for names in self.stages[:stage])

    def span(self, stage: int) -> range:
        """Return the numbers of a stage's blocks in the model."""
        first = self.first_block(stage)
        return range(first, first + len(self.stages[stage]))


def cut_model(
    blocks: Mapping[str, nn.Module], plan: Plan, stage_map: StageMap, costs: Sequence[float]
) -> Stages:
    """Cut blocks into the stages of a plan: where it says, or such that their costs are even."""
    boundaries = plan.stage_boundaries or balanced_boundaries(costs, stage_map.num_stages)
    assert len(boundaries) == stage_map.num_stages - 1, "checked before anything is built"
    if boundaries and boundaries[-1] >= len(blocks):
        raise LayoutError(
            f"parallel.stage_boundaries = {list(boundaries)} cuts after the last of {len(blocks)} "
            f"blocks: the last cut must be below {len(blocks)}"
        )
    names = list(blocks)
    edges = [0, *boundaries, len(names)]
    stages = tuple(tuple(names[start:end]) for start, end in pairwise(edges))
    return Stages(stages=stages, holders=_holders(blocks, stages))


def _holders(
    blocks: Mapping[str, nn.Module], stages: Sequence[tuple[str, ...]]
) -> dict[str, tuple[int, ...]]:
    held: dict[str, list[int]] = {}
    serial = {id(p): name for name, p in named_parameters(blocks).items()}
    for number, names in enumerate(stages):
        mine = {id(p) for name in names for p in blocks[name].parameters()}
        for key in mine:
            held.setdefault(serial[key], []).append(number)
    return {name: tuple(found) for name, found in held.items() if len(found) > 1}


def serial_names(blocks: Mapping[str, nn.Module], stage: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage under the names they have in the whole model."""
    tied = tied_names(blocks)
    mine = named_parameters({name: blocks[name] for name in stage})
    return {tied.get(name, name): parameter for name, parameter in mine.items()}
