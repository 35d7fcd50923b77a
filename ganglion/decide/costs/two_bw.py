"""PipeDream-2BW's closed form for the time of a batch (2006.09503, appendix A.1.1; spec C.3).

For one microbatch of a stage, T_comp its forward and backward (with recomputation its forward
twice), T_p2p the messages of activations and gradients, and T_ar the sum over the w replicas:

    pipelined        t = max over stages of max(T_comp + T_p2p, T_ar / m)
    not pipelined    t = sum over stages of the same
    T_p2p            2 |A| / bandwidth between stages, where d > 1
    T_ar             2 (w-1)/w |gradients| / bandwidth between replicas

so that m microbatches of a batch take m t. Messages are added to computation, while the sum is
taken to overlap with it. The planner of the paper, Algorithm 1, keeps the widths and depths with
the highest b / t, the throughput of one pipeline.

Fits of the released engine, which overlaps nothing, need other terms: those are in the simulator,
under a cluster file's [runtime].
"""

from __future__ import annotations

from collections.abc import Sequence

from ganglion.decide.costs.block_times import model_work
from ganglion.decide.costs.cluster import Cluster
from ganglion.decide.costs.stages import stage_times
from ganglion.decide.costs.times import StageTimes
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import ModelShape


def two_bw_step_s(
    shape: ModelShape, plan: Plan, cluster: Cluster, *, pipelined: bool = True
) -> float:
    """Return the time of one batch of a plan by the closed form."""
    times = stage_times(model_work(shape, plan), plan, cluster)
    return two_bw_batch_s(times, plan.num_microbatches, pipelined=pipelined)


def two_bw_batch_s(
    times: Sequence[StageTimes], num_microbatches: int, *, pipelined: bool = True
) -> float:
    """Return the time of one batch from the times of all stages."""
    slots = [
        max(one.slot_s + _messages_s(times, stage), one.reduce_s / num_microbatches)
        for stage, one in enumerate(times)
    ]
    return num_microbatches * (max(slots) if pipelined else sum(slots))


def _messages_s(times: Sequence[StageTimes], stage: int) -> float:
    """Return the time of the activations that come to a stage and of their gradients back."""
    return 0.0 if stage == 0 else 2 * times[stage - 1].latency_s
