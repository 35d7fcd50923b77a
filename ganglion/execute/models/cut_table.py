"""Cuts from a table: what kinds of blocks a family of models has, and how each is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from ganglion.decide.topology import Cut, ModelCuts

CutTable = Mapping[type[nn.Module], Mapping[str, Cut]]
HeadCuts = Mapping[type[nn.Module], Callable[[nn.Module], Mapping[str, Cut]]]


def cuts_by_table(
    blocks: Mapping[str, nn.Module],
    table: CutTable,
    heads: HeadCuts,
    outputs: tuple[type[nn.Module], ...],
) -> ModelCuts | None:
    """Return the cuts of blocks that are all in `table`, by their children's names; else None.

    `heads` tells more of blocks with attention. Blocks give their features split over y, those of
    `outputs` over x. A child that a block does without is left out.
    """
    cuts: dict[str, Cut] = {}
    for name, block in blocks.items():
        if type(block) not in table:
            return None
        present = {child for child, module in block.named_modules() if module is not None}
        found = {child: cut for child, cut in table[type(block)].items() if child in present}
        if type(block) in heads:
            found |= heads[type(block)](block)
        cuts |= {f"{name}.{child}" if child else name: cut for child, cut in found.items()}
    is_output = isinstance([*blocks.values()][-1], outputs)
    return ModelCuts(cuts, "x" if is_output else "y")
