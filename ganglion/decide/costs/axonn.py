"""AxoNN-4D's own model of communication, with which it ranks layouts (2502.08145, section V-B).

For a layer O = I W with I (m, k) and W (k, n), seconds of one step at b bytes an element:

    t_AG,z = b / beta_z    (Gz-1) k n / (Gx Gy Gz)        gather of the weight
    t_RS,z = b / beta_z    (Gz-1)/Gz k n / (Gx Gy)        sum of its gradient
    t_AR,y = 2b / beta_y   (Gy-1)/Gy m n / (Gz Gx)        sum of the output, forward
    t_AR,x = 2b / beta_x   (Gx-1)/Gx m k / (Gz Gy)        sum of the input's gradient, backward
    t_AR,d = 2b / beta_d   (Gd-1)/Gd k n / (Gx Gy Gz)     sum over replicas

A transposed layer swaps x and y; the groups keep their bandwidths. With the axes in the order of
the ranks and P the product of the sizes before an axis of size G:

    P G <= ranks of a node    beta is measured, by (P, G)
    otherwise                 beta = beta_inter / min(ranks of a node, P)

There is no latency, no computation and no overlap: `block_times` and the simulator, our own model,
have these. The two are kept apart so that their answers can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ganglion.decide.costs.block_times import message_element_bytes
from ganglion.decide.costs.cluster import BYTES_PER_GBIT, Cluster
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import TABLE, ModelShape, SplitLayer, layers_of
from ganglion.errors import ConfigError, LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class AxonnTimes:
    """Seconds of communication of one step, by collective."""

    ag_s: float
    rs_s: float
    ar_forward_s: float
    ar_backward_s: float
    ar_data_s: float

    @property
    def total_s(self) -> float:
        """All of them, one after the other."""
        return self.ag_s + self.rs_s + self.ar_forward_s + self.ar_backward_s + self.ar_data_s


def axonn_times(
    shape: ModelShape, plan: Plan, cluster: Cluster, *, num_gathers: int = 1
) -> AxonnTimes:
    """Return the times of the products between embedding and head, as the paper counts them.

    The paper gathers each weight once a step. An engine that stores pieces gathers once more for
    backward and, if it recomputes, a third time: `num_gathers` of 2 or 3.
    """
    if plan.pipe > 1:
        raise LayoutError(
            f"parallel.pipe = {plan.pipe}, but the communication model of AxoNN-4D has no "
            f"pipelines: use pipe = 1, or the method full"
        )
    rates = {axis: prefix_rate(plan, axis, cluster) for axis in ("x", "y", "z", "data")}
    layers = _products(shape, plan.microbatch_size)
    element_bytes = message_element_bytes(plan)
    weight_bytes = element_bytes * sum(math.prod(one.parameter.shape) for one in layers)
    stored_bytes = weight_bytes / (plan.x * plan.y * plan.z)
    forward_s = backward_s = 0.0
    for one in layers:
        inner, outer = _axes(one)
        rows_bytes = plan.num_microbatches * element_bytes
        forward_s += _sum_s(one.num_outputs * rows_bytes, inner, outer, plan, rates)
        backward_s += _sum_s(one.num_inputs * rows_bytes, outer, inner, plan, rates)
    return AxonnTimes(
        ag_s=num_gathers * (plan.z - 1) * stored_bytes / rates["z"],
        rs_s=(plan.z - 1) * stored_bytes / rates["z"],
        ar_forward_s=forward_s,
        ar_backward_s=backward_s,
        ar_data_s=2 * (plan.data - 1) / plan.data * stored_bytes / rates["data"],
    )


def prefix_rate(plan: Plan, axis: str, cluster: Cluster) -> float:
    """Return the effective bytes a second along an axis, by the sizes of the axes before it."""
    known = cluster.prefix_rates
    if known is None:
        raise ConfigError(
            f"{cluster.source}: cluster.prefix_rates is missing, which the communication model of "
            f"AxoNN-4D needs: write [prefix_rates] with inter_gbps and intra_gbps"
        )
    mesh = plan.mesh()
    before = math.prod(
        mesh.size(one) for one in mesh.rank_order[: mesh.rank_order.index(axis)] if one != "pipe"
    )
    size = mesh.size(axis)
    if size == 1:
        return math.inf
    if before * size > cluster.ranks_per_node:
        return known.inter_gbps * BYTES_PER_GBIT / min(cluster.ranks_per_node, before)
    if (before, size) not in known.intra_gbps:
        raise ConfigError(
            f'{cluster.source}: cluster.prefix_rates.intra_gbps has no "{before}x{size}", the rate '
            f"of groups of {size} ranks along {axis} with {before} ranks inside: measure and write "
            f"it"
        )
    return known.intra_gbps[before, size] * BYTES_PER_GBIT


def _products(shape: ModelShape, microbatch_size: int) -> list[SplitLayer]:
    """Return the layers of all blocks, of models with a vocabulary without its two ends."""
    blocks = layers_of(shape, microbatch_size)
    if blocks[0] and blocks[0][0].parameter.role == TABLE:
        blocks = blocks[1:-1]
    return [layer for block in blocks for layer in block]


def _axes(layer: SplitLayer) -> tuple[str, str]:
    """Return the axes that split inputs and outputs: y and x, or swapped."""
    transposed = layer.in_axis == "x" or layer.out_axis == "y"
    return ("x", "y") if transposed else ("y", "x")


def _sum_s(num_bytes: float, over: str, split: str, plan: Plan, rates: dict[str, float]) -> float:
    """Return the time to sum activations of a microbatch's rows over one axis."""
    mesh = plan.mesh()
    size = mesh.size(over)
    return 2 * (size - 1) / size * num_bytes / mesh.size(split) / rates[over]
