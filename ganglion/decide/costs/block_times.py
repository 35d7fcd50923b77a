"""Times of blocks and of their layers, on one rank and for one microbatch.

A product takes the time of its flop at the rate that large products reach, and the time to move its
operands and its result through device memory:

    (m, k) x (k, n)      2 m k n / rate  +  (m k + k n + m n) bytes / memory bandwidth

so that small microbatches and narrow pieces of a layer are slower for each flop (an additive
roofline: Williams, Waterman and Patterson 2009 take the larger of the two, which assumes that they
always overlap). What is kept for backward is written and read in forward, and is read there with a
gradient written and read beside it in backward: norms, activations and softmax cost that. They
compute, too, so their rate is one of its own (`activation_gbps`).

Collectives are the rings of AxoNN-4D (2502.08145, section V-B, equations 1 to 5; the spec's part
B.3), with the latency of every hop; the rings of one axis are all at work at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ganglion.decide.costs.cluster import Cluster, Compute
from ganglion.decide.costs.network import (
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
    slowest_ring,
)
from ganglion.decide.plan import FP32, Plan
from ganglion.decide.shapes import (
    FLOAT,
    HALF,
    TABLE,
    BlockCost,
    BlockLayers,
    Layout,
    ModelShape,
    SplitLayer,
    activations_of,
    blocks_of,
    layers_of,
)
from ganglion.decide.topology import TENSOR_AXES

# How often a byte that is kept for backward moves through device memory.
FORWARD_PASSES, BACKWARD_PASSES = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What one block computes for one microbatch, and the bytes that a rank keeps of it."""

    cost: BlockCost
    layers: BlockLayers = ()
    kept_bytes: int = 0


def model_work(shape: ModelShape, plan: Plan) -> list[BlockWork]:
    """Return the work of every block of a model under a plan; blocks alike are one object."""
    layout = Layout(
        microbatch_size=plan.microbatch_size, mesh=plan.mesh(), precision=plan.computes_in
    )
    rows = zip(
        blocks_of(shape, plan.microbatch_size),
        layers_of(shape, plan.microbatch_size),
        activations_of(shape, layout),
        strict=True,
    )
    seen: dict[tuple[int, int, int], BlockWork] = {}
    works = []
    for cost, layers, kept in rows:
        key = (id(cost), id(layers), id(kept))  # shapes repeat the records of blocks alike
        if key not in seen:
            seen[key] = BlockWork(cost=cost, layers=layers, kept_bytes=kept.kept_bytes)
        works.append(seen[key])
    return works


def message_element_bytes(plan: Plan) -> int:
    """Return the bytes of an element of a tensor between blocks."""
    return FLOAT if plan.computes_in == FP32 else HALF


def weight_element_bytes(plan: Plan) -> int:
    """Return the bytes of an element of a weight, and of its gradient, as they are stored."""
    return HALF if plan.has_masters else FLOAT


# --- computation ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """One block: its forward, and the two halves of its backward."""

    forward_s: float
    input_s: float
    weight_s: float


class ComputeClock:
    """Turns flop and bytes of a plan's ranks into seconds."""

    def __init__(self, plan: Plan, compute: Compute) -> None:
        """Take the axes and the precision of a plan, and the speed of a rank."""
        self._sizes = {None: 1, "x": plan.x, "y": plan.y}
        self._rate = compute.flops(plan.computes_in)
        self._bytes_per_s = compute.memory_bytes_per_s
        self._activation_bytes_per_s = compute.activation_bytes_per_s
        self._block_s = compute.block_s
        self._element_bytes = message_element_bytes(plan)
        self._known: dict[int, BlockTimes] = {}

    def block(self, work: BlockWork) -> BlockTimes:
        """Return the times of a block."""
        if id(work) not in self._known:
            self._known[id(work)] = self._block(work)
        return self._known[id(work)]

    def _block(self, work: BlockWork) -> BlockTimes:
        products = [self.product_s(layer) for layer in work.layers]
        of_inputs = [s for s, la in zip(products, work.layers, strict=True) if not la.of_data]
        before_s, after_s = self.others_s(work)
        return BlockTimes(
            forward_s=sum(products) + before_s,
            input_s=sum(of_inputs) + after_s,
            weight_s=sum(products) if work.layers else work.cost.weight_flops / self._rate,
        )

    def product_s(self, layer: SplitLayer) -> float:
        """Return the time of one of a layer's products, alike forward and backward."""
        shape, is_table = layer.parameter.shape, layer.parameter.role == TABLE
        outputs = shape[1] if is_table else shape[0]
        rows = layer.num_outputs / outputs
        taken, given = self._sizes[layer.in_axis], self._sizes[layer.out_axis]
        if is_table:  # rows are read and written, nothing is multiplied
            return 2 * rows * outputs / given * self._element_bytes / self._bytes_per_s
        inputs = layer.product_flops / (2 * rows * outputs)
        moved = rows * inputs / taken + inputs * outputs / (taken * given) + rows * outputs / given
        product_s = layer.product_flops / (taken * given) / self._rate
        return product_s + moved * self._element_bytes / self._bytes_per_s

    def others_s(self, work: BlockWork) -> tuple[float, float]:
        """Return the time of all but the products of layers, in forward and in backward."""
        flops = [layer.product_flops for layer in work.layers]
        # Heads are split as the inputs of the layer behind them are.
        share = self._sizes[work.layers[-1].in_axis] if work.layers else 1
        of_inputs = sum(f for f, la in zip(flops, work.layers, strict=True) if not la.of_data)
        forward_s = (work.cost.forward_flops - sum(flops)) / share / self._rate
        input_s = max(0.0, work.cost.input_flops - of_inputs) / share / self._rate
        kept_s = work.kept_bytes / self._activation_bytes_per_s
        forward_s += FORWARD_PASSES * kept_s + self._block_s
        return forward_s, input_s + BACKWARD_PASSES * kept_s + self._block_s


# --- layers with their collectives ---------------------------------------------------------------


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
    blocks: Sequence[BlockWork], plan: Plan, cluster: Cluster, pipe: int
) -> list[list[LayerTimes]]:
    """Return the times of the layers of some blocks, held by the ranks of a pipe coordinate."""
    clock = LayerClock(plan, cluster, pipe)
    numbers = itertools.count()
    layers = [layer for block in blocks for layer in block.layers]
    # The table that a tied layer multiplies with is the first weight of the model.
    has_table = bool(layers) and layers[0].parameter.role == TABLE
    return [clock.block(block, numbers, tied_to_first=has_table) for block in blocks]


class LayerClock:
    """Times of layers with the collectives of a plan, at one pipe coordinate."""

    def __init__(self, plan: Plan, cluster: Cluster, pipe: int) -> None:
        """Find the ring of each tensor axis."""
        self._mesh = plan.mesh()
        self._compute = ComputeClock(plan, cluster.require_compute())
        self._element_bytes = message_element_bytes(plan)
        self._weight_element_bytes = weight_element_bytes(plan)
        self._shares = _shares_pieces(plan, cluster)
        self._rings = {axis: slowest_ring(self._mesh, axis, cluster, pipe) for axis in TENSOR_AXES}

    def block(
        self, work: BlockWork, numbers: itertools.count[int], *, tied_to_first: bool
    ) -> list[LayerTimes]:
        """Return the layers of a block, whose other work comes before the last of them."""
        before_s, after_s = self._compute.others_s(work)
        if not work.layers:
            return [
                LayerTimes(weight=next(numbers), product_s=0.0, before_s=before_s, after_s=after_s)
            ]
        last = len(work.layers) - 1
        return [
            self._layer(
                layer,
                0 if tied_to_first and layer.parameter.is_tied else next(numbers),
                (before_s, after_s) if number == last else (0.0, 0.0),
            )
            for number, layer in enumerate(work.layers)
        ]

    def _layer(self, layer: SplitLayer, number: int, others_s: tuple[float, float]) -> LayerTimes:
        mesh, parameter = self._mesh, layer.parameter
        weight_bytes = parameter.num_gathered(mesh) * self._weight_element_bytes
        is_gathered = parameter.is_gathered(mesh)
        in_axis, out_axis = self._long(layer.in_axis), self._long(layer.out_axis)
        return LayerTimes(
            weight=number,
            product_s=self._compute.product_s(layer),
            before_s=others_s[0],
            after_s=others_s[1],
            gather_s=all_gather_s(weight_bytes, self._rings["z"])
            if is_gathered and not self._shares
            else 0.0,
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


def _shares_pieces(plan: Plan, cluster: Cluster) -> bool:
    """Return whether ranks along z read each other's weights where they are."""
    if not (cluster.runtime.shares_pieces and plan.share_pieces) or plan.pipe > 1:
        return False
    group = plan.mesh().group_of(0, ("z",))
    return len({cluster.node_of(rank) for rank in group}) == 1
