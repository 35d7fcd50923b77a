"""Part `scaling` of the averaging benchmark: GoogleNet on 1 to 16,384 nodes by the simulator.

The price of a byte is chosen so that 2 nodes take what the paper measured (You, Buluc, Demmel
2017, table 4), and nothing else is fitted. Weights go round a ring, as MPI libraries send large
ones; `tree` is what trees of log2(n) rounds, which the paper reckons with, would have cost with a
price of their own that suits the same 2 nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ganglion.decide.simulator.averaging.costs import (
    RING,
    TREE,
    TWO_LEVEL,
    AveragingCosts,
    MessagePrice,
)
from ganglion.decide.simulator.averaging.simulate import efficiency

ITERATIONS = 300
# Seconds of 300 iterations by number of nodes.
PAPER_S: Mapping[int, float] = {
    1: 1533,
    2: 1590,
    4: 1608,
    8: 1641,
    16: 1630,
    32: 1662,
    64: 1674,
}
MESSAGE_S = 1.2e-6  # of an interconnect of the time; 2 nodes say nothing about it
WEIGHT_BYTES = 28_000_000
LARGE = (64, 1024, 16384)


@dataclass(frozen=True)
class ScalingRow:
    """The efficiency of some nodes: value is in percent, `difference` in points to the paper."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    ratio_to: str | None
    ratio: float | None
    nodes: int
    way: str
    paper: float | None = None
    difference: float | None = None


def calibrated_costs(reduction: str, group_size: int = 1) -> AveragingCosts:
    """Return costs at which 1 and 2 nodes take the time of the paper."""
    pass_s, two_s = (PAPER_S[nodes] / ITERATIONS for nodes in (1, 2))
    # Between 2 ranks, a tree moves every byte twice and a ring once, both with 2 messages.
    times = 2 if reduction == TREE else 1
    byte_s = (two_s - pass_s - 2 * MESSAGE_S) / (times * WEIGHT_BYTES)
    return AveragingCosts(
        pass_s=pass_s,
        device_link=MessagePrice(MESSAGE_S, byte_s),
        tensor_bytes=(WEIGHT_BYTES,),
        reduction=reduction,
        group_size=group_size,
    )


def scaling_rows() -> list[ScalingRow]:
    """Return the table of the paper as predicted, and what other reductions and overlap give."""
    ring = calibrated_costs(RING)
    rows = [_row(RING, nodes, ring, overlaps=False) for nodes in PAPER_S if nodes > 1]
    for nodes in LARGE:
        group_size = 1 << ((nodes.bit_length() - 1) // 2)
        for reduction, overlaps in itertools.product((TREE, RING, TWO_LEVEL), (False, True)):
            costs = calibrated_costs(reduction, group_size if reduction == TWO_LEVEL else 1)
            way = reduction + ("_overlap" if overlaps else "")
            if (way, nodes) != (RING, max(PAPER_S)):  # that row is there
                rows.append(_row(way, nodes, costs, overlaps=overlaps))
    return rows


def _row(way: str, nodes: int, costs: AveragingCosts, *, overlaps: bool) -> ScalingRow:
    value = 100 * efficiency(costs, nodes, overlaps=overlaps)
    is_told = nodes in PAPER_S
    paper = 100 * PAPER_S[1] / PAPER_S[nodes] if is_told else None
    return ScalingRow(
        *(f"{way}_{nodes}", value, "%", value, value),
        ratio_to="paper" if is_told else None,
        ratio=None if paper is None else value / paper,
        nodes=nodes,
        way=way,
        paper=paper,
        difference=None if paper is None or way != RING else abs(value - paper),
    )
