"""The flop of a batch, as papers count them to state a share of the peak.

    model flop       forward and backward of all blocks
    hardware flop    these, and one more forward of all blocks but the last if the plan recomputes

For a GPT without positions of their own, hardware flop are 96 b s l h^2 (1 + s/6h + V/16lh) of
2104.04473, which AxoNN's papers use: the layers are computed again, the head is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from ganglion.decide.plan import Plan
from ganglion.decide.shapes import ModelShape, blocks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFlops:
    """The flop of one global batch over all ranks."""

    model: float
    hardware: float


def batch_flops(shape: ModelShape, plan: Plan) -> BatchFlops:
    """Return the flop of one batch of a plan."""
    blocks = blocks_of(shape, plan.microbatch_size)
    model = sum(block.total_flops for block in blocks)
    again = sum(block.forward_flops for block in blocks[:-1]) if plan.recompute != "none" else 0.0
    times = plan.num_microbatches * plan.num_shares
    return BatchFlops(model=times * model, hardware=times * (model + again))
