"""Times of split layers on a cluster, computation and collectives: one microbatch, one rank.

Collectives are the rings of AxoNN-4D (2502.08145, section V-B, equations 1 to 5; the spec's part
B.3), with the latency of every hop; the rings of one axis are all at work at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ganglion.decide.costs.cluster import Cluster
from ganglion.decide.costs.network import (
    Ring,
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
    rings_along,
)
from ganglion.decide.costs.stages import message_element_bytes, weight_element_bytes
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import TABLE, BlockLayers, SplitLayer
from ganglion.decide.topology import TENSOR_AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One layer: each of its products, and its collectives, 0 where an axis has one rank.

    `gather_s` and `scatter_s` go along z, `output_s` over `in_axis`, `input_s` over `out_axis`.
    `before_s` and `after_s` are other computations, before it in forward and after it in backward.
    Layers that share a weight have the same `weight`; `weight_bytes` are those of its block.
    """

    weight: int
    product_s: float
    before_s: float = 0.0
    after_s: float = 0.0
    gather_s: float = 0.0
    scatter_s: float = 0.0
    output_s: float = 0.0
    input_s: float = 0.0
    in_axis: str | None = None
    out_axis: str | None = None
    weight_bytes: int = 0
    of_data: bool = False


def layer_times(
    blocks: Sequence[BlockLayers], plan: Plan, cluster: Cluster, pipe: int
) -> list[list[LayerTimes]]:
    """Return the times of the layers of some blocks, held by the ranks of a pipe coordinate."""
    clock = _Clock(plan, cluster, pipe)
    numbers = itertools.count()
    # The table that a tied layer multiplies with is the first weight of the model.
    has_table = blocks[0][0].parameter.role == TABLE
    return [
        [
            clock.layer(layer, 0 if has_table and layer.parameter.is_tied else next(numbers))
            for layer in block
        ]
        for block in blocks
    ]


class _Clock:
    """Turns flop and bytes into seconds, at one pipe coordinate."""

    def __init__(self, plan: Plan, cluster: Cluster, pipe: int) -> None:
        self._mesh = plan.mesh()
        self._flops = cluster.require_compute().flops(plan.computes_in) * plan.x * plan.y
        self._element_bytes = message_element_bytes(plan)
        self._weight_element_bytes = weight_element_bytes(plan)
        self._rings = {axis: self._slowest(axis, cluster, pipe) for axis in TENSOR_AXES}

    def layer(self, layer: SplitLayer, number: int) -> LayerTimes:
        mesh, parameter = self._mesh, layer.parameter
        weight_bytes = parameter.num_gathered(mesh) * self._weight_element_bytes
        is_gathered = parameter.is_gathered(mesh)
        in_axis, out_axis = self._long(layer.in_axis), self._long(layer.out_axis)
        return LayerTimes(
            weight=number,
            product_s=layer.product_flops / self._flops,
            before_s=layer.before_flops / self._flops,
            after_s=layer.after_flops / self._flops,
            gather_s=all_gather_s(weight_bytes, self._rings["z"]) if is_gathered else 0.0,
            scatter_s=reduce_scatter_s(weight_bytes, self._rings["z"]) if is_gathered else 0.0,
            output_s=self._sum_s(layer.num_outputs, in_axis, out_axis),
            input_s=0.0 if layer.of_data else self._sum_s(layer.num_inputs, out_axis, in_axis),
            in_axis=in_axis,
            out_axis=out_axis,
            weight_bytes=weight_bytes if is_gathered else 0,
            of_data=layer.of_data,
        )

    def _sum_s(self, num_elements: int, over: str | None, split: str | None) -> float:
        """Return the time to sum activations over one axis that another axis splits."""
        if over is None:
            return 0.0
        parts = 1 if split is None else self._mesh.size(split)
        return all_reduce_s(num_elements / parts * self._element_bytes, self._rings[over])

    def _long(self, axis: str | None) -> str | None:
        return axis if axis is not None and self._mesh.size(axis) > 1 else None

    def _slowest(self, axis: str, cluster: Cluster, pipe: int) -> Ring:
        rings = rings_along(self._mesh, (axis,), cluster).items()
        mine = [ring for group, ring in rings if self._mesh.coordinates(group[0]).pipe == pipe]
        return max(mine, key=lambda ring: (ring.latency_s, 1 / ring.bytes_per_s))
