"""The closed form that ranks candidates: time and memory without a simulation.

    step = slots * slot + fill + hops + reduction and update that nothing hides

    slot      what the slowest stage spends on a microbatch: products, what is computed again,
              collectives of split layers that no product hides
    fill      slots in which a pipeline that flushes fills and drains: p - 1 (GPipe, 1F1B, AxoNN),
              (p - 1) / chunks (interleaved), (p - 1) (F + B - W) / (F + B + W) (zero bubble H1),
              (p - 1) (F + B - 2 W) / (F + B + W) (V), none (2BW, stashing)

(2104.04473, section 2.2; 2401.10241, table 2; F, B, W of a stage and a microbatch.) The first look
takes a stage as a p-th of the model: no cut is better. A second look, at the best of these, cuts
the model into whole blocks. A simulation confirms what is left.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ganglion.decide.costs import (
    MIXED,
    BlockWork,
    LayerClock,
    LayerTimes,
    all_reduce_s,
    link_between,
    slowest_ring,
    state_memory,
    transfer_s,
    update_s,
)
from ganglion.decide.plan import Plan
from ganglion.decide.planner.candidates import Layout, Pipelining
from ganglion.decide.planner.question import Question
from ganglion.decide.shapes import (
    FLOAT,
    HALF,
    BlockCost,
    BlockLayers,
    activations_of,
    blocks_of,
    describe_shape,
    layers_of,
    parameters_of,
)
from ganglion.decide.shapes import Layout as TensorLayout
from ganglion.decide.topology import Coordinates, Mesh

# Parameters, so many that an update grows in proportion from there on.
_MANY = 10**9


class Storage(NamedTuple):
    """What is done so that a rank's memory suffices."""

    recompute: str
    recompute_every: int
    offload: str


class Estimate(NamedTuple):
    """A candidate with its estimated step time and peak memory of a rank."""

    step_s: float
    memory_bytes: float
    layout: Layout
    pipelining: Pipelining
    storage: Storage
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A microbatch through the whole model, on ranks that share it over x, y and z."""

    forward_s: float
    input_s: float
    weight_s: float
    again_s: float  # what recomputation adds to backward, if there is some
    longest_s: float  # of a block, there and back
    kinds_s: tuple[float, ...]  # of each kind of block, there and back
    again_kinds_s: tuple[float, ...]
    kept_bytes: float
    input_bytes: float
    block_bytes: float  # kept by the block that keeps most
    last_bytes: float  # scratch of the last block, which has the loss
    message_bytes: float

    @property
    def whole_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s


class Estimator:
    """Estimates candidates of one question; what many share is computed once."""

    def __init__(self, question: Question) -> None:
        """Count the parameters of the model."""
        self._question = question
        self._cluster = question.cluster
        self._compute = question.cluster.require_compute()
        model = describe_shape(question.shape)
        kinds = {block.name: block for block in model.blocks}
        # Equal blocks have equal names: each kind is looked at once.
        self._kinds = replace(model, blocks=tuple(kinds.values()))
        names = list(kinds)
        self._places = [names.index(block.name) for block in model.blocks]
        self._counts = [self._places.count(place) for place in range(len(names))]
        counts = [block.num_parameters for block in model.blocks]
        self._num_parameters = sum(counts)
        self._num_first, self._num_last = (counts[0], counts[-1]) if len(counts) > 1 else (0, 0)
        self._num_blocks = len(counts)
        self._works: dict[int, list[tuple[BlockCost, BlockLayers]]] = {}
        self._passes: dict[tuple[object, ...], _Pass] = {}
        self._updates: dict[tuple[str, str], tuple[float, float]] = {}
        self._hops: dict[tuple[object, ...], float] = {}
        self._reductions: dict[tuple[object, ...], float] = {}
        self._state: dict[tuple[object, ...], float] = {}

    # --- time ----------------------------------------------------------------------------------

    def step_s(
        self, layout: Layout, pipelining: Pipelining, storage: Storage, precision: str
    ) -> float:
        """Return the time of a step whose stages are exact parts of the model."""
        one = self._pass(layout, precision)
        again_s = one.again_s if storage.recompute != "none" else 0.0
        slot_s = max((one.whole_s + again_s) / layout.pipe, one.longest_s)
        return self._step_s(layout, pipelining, storage, precision, slot_s)

    def cut_step_s(self, estimate: Estimate) -> float:
        """Return the time of a step whose stages are whole blocks."""
        layout, pipelining, storage = estimate.layout, estimate.pipelining, estimate.storage
        costs_s = self.blocks_s(layout, storage, estimate.precision)
        chunks = 2 if pipelining.schedule == "zero_bubble_v" else max(1, pipelining.chunks)
        slot_s = chunks * _longest_stage_s(costs_s, layout.pipe * chunks)
        return self._step_s(layout, pipelining, storage, estimate.precision, slot_s)

    def blocks_s(self, layout: Layout, storage: Storage, precision: str) -> list[float]:
        """Return the time of every block for a microbatch, there and back."""
        one = self._pass(layout, precision)
        kinds_s = list(one.kinds_s)
        # Gathers and sums that nothing hides are shared out evenly.
        alone_s = sum(count * kind_s for count, kind_s in zip(self._counts, kinds_s, strict=True))
        if storage.recompute != "none":
            kinds_s = [a + b for a, b in zip(kinds_s, one.again_kinds_s, strict=True)]
        share = one.whole_s / alone_s
        return [share * kinds_s[place] for place in self._places]

    def _step_s(
        self,
        layout: Layout,
        pipelining: Pipelining,
        storage: Storage,
        precision: str,
        slot_s: float,
    ) -> float:
        one = self._pass(layout, precision)
        pipe, count = layout.pipe, layout.num_microbatches
        again_s = one.again_s if storage.recompute != "none" else 0.0
        slot_s += 2 * self._compute.action_s
        hop_s = self._hop_s(layout, pipelining, one.message_bytes)
        slot_s = max(slot_s, 2 * hop_s)
        fill = _fill_slots(pipelining, pipe, one, again_s)
        reduce_s = self._reduce_s(layout, pipelining, precision)
        updating_s = self._update_s(layout, storage.offload, precision)
        if pipelining.schedule in ("two_bw", "stash"):
            return max(count * slot_s, reduce_s + updating_s)
        hidden_s = (one.input_s + one.weight_s + again_s) if pipe == 1 else 0.0
        hops_s = 2 * (pipe - 1) * hop_s * max(1, pipelining.chunks)
        return (count + fill) * slot_s + hops_s + max(0.0, reduce_s - hidden_s) + updating_s

    def least_step_s(self, layout: Layout, precision: str) -> float:
        """Return a bound: no fill, no messages, nothing computed again."""
        one = self._pass(layout, precision)
        return layout.num_microbatches * max(one.whole_s / layout.pipe, one.longest_s)

    def network_s(self, layout: Layout, rank_order: tuple[str, ...], precision: str) -> float:
        """Return the time of a step's messages and reductions alone, to compare rank orders."""
        pipelining = Pipelining("one_f_one_b", 0, rank_order)
        hop_s = self._hop_s(layout, pipelining, self._pass(layout, precision).message_bytes)
        return 2 * layout.num_microbatches * hop_s + self._reduce_s(layout, pipelining, precision)

    def _pass(self, layout: Layout, precision: str) -> _Pass:
        key = (layout.x, layout.y, layout.z, layout.microbatch_size, precision)
        if key not in self._passes:
            self._passes[key] = self._computed_pass(*key)
        return self._passes[key]

    def _computed_pass(self, x: int, y: int, z: int, size: int, precision: str) -> _Pass:
        # As many groups as it takes until they lie on the nodes as the first one does.
        node, group = self._cluster.ranks_per_node, x * y * z
        data = min(math.lcm(node, group), self._question.num_ranks) // group
        plan = Plan(data=data, x=x, y=y, z=z, microbatch_size=size, precision=precision)
        layout = TensorLayout(microbatch_size=size, mesh=plan.mesh(), precision=plan.computes_in)
        held = activations_of(self._kinds, layout)
        clock, numbers = LayerClock(plan, self._cluster, 0), itertools.count()
        blocks = []
        for (cost, layers), kept in zip(self._works_of(size), held, strict=True):
            work = BlockWork(cost=cost, layers=layers, kept_bytes=kept.kept_bytes)
            blocks.append(_block_pass(clock.block(work, numbers, tied_to_first=False)))
        counted = list(zip(self._counts, held, strict=True))
        return replace(
            _summed(list(zip(self._counts, blocks, strict=True))),
            kinds_s=tuple(block.whole_s for block in blocks),
            again_kinds_s=tuple(block.forward_s + block.waits_s for block in blocks),
            kept_bytes=sum(count * block.saved_bytes for count, block in counted),
            input_bytes=sum(count * block.input_bytes for count, block in counted),
            block_bytes=max(block.saved_bytes for block in held),
            last_bytes=held[self._places[-1]].scratch_bytes,
            message_bytes=held[self._places[self._num_blocks // 2]].output_bytes,
        )

    def _works_of(self, size: int) -> list[tuple[BlockCost, BlockLayers]]:
        """Return what each kind of block computes for a size of microbatches."""
        if size not in self._works:
            costs, layers = blocks_of(self._kinds, size), layers_of(self._kinds, size)
            self._works[size] = list(zip(costs, layers, strict=True))
        return self._works[size]

    def _hop_s(self, layout: Layout, pipelining: Pipelining, num_bytes: float) -> float:
        """Return the time of a message between two stages, with all ranks of a node sending."""
        if layout.pipe == 1:
            return 0.0
        key = (layout[:5], pipelining.rank_order, num_bytes)
        if key not in self._hops:
            mesh = _mesh(layout, pipelining)
            target = mesh.rank(Coordinates(pipe=1))
            crosses = self._cluster.node_of(0) != self._cluster.node_of(target)
            node = self._cluster.ranks_per_node
            senders = min(node, target) if crosses else 1
            link = link_between(self._cluster, 0, target)
            self._hops[key] = transfer_s(num_bytes, link, senders)
        return self._hops[key]

    def _reduce_s(self, layout: Layout, pipelining: Pipelining, precision: str) -> float:
        if layout.data == 1:
            return 0.0
        key = (layout[:5], pipelining.rank_order, precision)
        if key not in self._reductions:
            ring = slowest_ring(_mesh(layout, pipelining), "data", self._cluster, 0)
            num_bytes = _weight_bytes(precision) * self._held(layout)
            self._reductions[key] = all_reduce_s(num_bytes, ring)
        return self._reductions[key]

    def _update_s(self, layout: Layout, offload: str, precision: str) -> float:
        key = (offload, precision)
        if key not in self._updates:
            plan = Plan(precision=precision, offload=offload)
            many_s, twice_s = (update_s(n * _MANY, plan, self._cluster) for n in (1, 2))
            self._updates[key] = 2 * many_s - twice_s, (twice_s - many_s) / _MANY
        fixed_s, parameter_s = self._updates[key]
        return fixed_s + self._held(layout) * parameter_s

    # --- memory --------------------------------------------------------------------------------

    def memory_bytes(
        self, layout: Layout, pipelining: Pipelining, storage: Storage, precision: str
    ) -> float:
        """Return about what a rank of the first or of the last stage holds, whichever is more."""
        one = self._pass(layout, precision)
        state = self._state_bytes(pipelining.schedule, storage.offload, precision)
        gathered = (1 + 1 / layout.z) * _weight_bytes(precision) * layout.z if layout.z > 1 else 0
        kept, inputs = one.kept_bytes / layout.pipe, one.input_bytes / layout.pipe
        every = max(1, storage.recompute_every)
        length = every if storage.recompute == "full" else math.sqrt(self._num_blocks)

        def live(alive: float) -> float:
            if storage.recompute == "none":
                return alive * kept
            return alive * inputs / length + min(kept, length * one.block_bytes)

        per_parameter = state + gathered
        first = self._held(layout) * per_parameter + live(_num_alive(pipelining, layout))
        if layout.pipe == 1:
            return first + one.last_bytes
        last = self._held(layout, self._num_last) * per_parameter + live(1) + one.last_bytes
        return max(first, last)

    def _held(self, layout: Layout, num_more: int | None = None) -> float:
        """Return the parameters of a rank of the first stage, or of one with so many at an end."""
        num_more = self._num_first if num_more is None else num_more
        inner = self._num_parameters - self._num_first - self._num_last
        if layout.pipe == 1:
            inner, num_more = self._num_parameters, 0
        return (inner / layout.pipe + num_more) / (layout.x * layout.y * layout.z)

    def _state_bytes(self, schedule: str, offload: str, precision: str) -> float:
        """Return the bytes that a rank holds for each of its parameters."""
        key = (schedule, offload, precision)
        if key not in self._state:
            self._state[key] = self._computed_state(schedule, offload, precision)
        return self._state[key]

    def _computed_state(self, schedule: str, offload: str, precision: str) -> float:
        parameters = next(p for block in parameters_of(self._question.shape) for p in [block] if p)
        has_masters = precision.endswith("_master")
        rules = replace(
            self._question.rules,
            num_versions=2 if schedule in ("two_bw", "stash") else 1,
            formats=MIXED if has_masters else self._question.rules.formats,
        )
        held = state_memory(parameters, Mesh(), rules)
        count = sum(parameter.num_stored(Mesh()) for parameter in parameters)
        if offload != "none":
            wide = count * rules.formats.wide_gradient
            held = replace(held, master=0, moments=0, gradients=held.gradients - wide)
        return held.total / count


@dataclass(frozen=True, slots=True)
class _BlockPass:
    forward_s: float
    input_s: float
    weight_s: float
    waits_s: float  # of forward, for sums over x and y
    late_s: float  # of backward, for sums that the product of weights does not hide
    gather_s: float
    scatter_s: float

    @property
    def whole_s(self) -> float:
        return self.forward_s + self.waits_s + self.input_s + self.late_s + self.weight_s


def _block_pass(layers: Sequence[LayerTimes]) -> _BlockPass:
    of_inputs = [layer for layer in layers if not layer.of_data]
    return _BlockPass(
        forward_s=sum(layer.product_s + layer.before_s for layer in layers),
        input_s=sum(layer.product_s for layer in of_inputs) + sum(la.after_s for la in layers),
        weight_s=sum(layer.product_s for layer in layers),
        waits_s=sum(layer.output_s for layer in layers),
        late_s=sum(max(0.0, layer.input_s - layer.product_s) for layer in of_inputs),
        gather_s=sum(layer.gather_s for layer in layers),
        scatter_s=sum(layer.scatter_s for layer in layers),
    )


def _summed(blocks: Sequence[tuple[int, _BlockPass]]) -> _Pass:
    """Return the blocks one after the other, with gathers and sums along z behind products."""
    forward_s = sum(n * (one.forward_s + one.waits_s) for n, one in blocks)
    input_s = sum(n * (one.input_s + one.late_s) for n, one in blocks)
    weight_s = sum(n * one.weight_s for n, one in blocks)
    gather_s = sum(n * one.gather_s for n, one in blocks)
    scatter_s = sum(n * one.scatter_s for n, one in blocks)
    exposed_s = max(0.0, gather_s - forward_s)
    late_s = max(0.0, gather_s + scatter_s - input_s - weight_s)
    return _Pass(
        forward_s=forward_s + exposed_s,
        input_s=input_s + late_s,
        weight_s=weight_s,
        again_s=forward_s + exposed_s,
        longest_s=max(one.whole_s for _, one in blocks),
        kinds_s=(),
        again_kinds_s=(),
        kept_bytes=0.0,
        input_bytes=0.0,
        block_bytes=0.0,
        last_bytes=0.0,
        message_bytes=0.0,
    )


def _longest_stage_s(costs_s: Sequence[float], num_stages: int) -> float:
    """Return the time of the longest stage in a cut that makes it about as short as it can be."""
    sums = [0.0, *itertools.accumulate(costs_s)]
    low, high = max(max(costs_s), sums[-1] / num_stages), sums[-1]
    while high > low * 1.005:
        middle = (low + high) / 2
        if _num_stages_within(sums, middle) <= num_stages:
            high = middle
        else:
            low = middle
    return high


def _num_stages_within(sums: Sequence[float], most: float) -> int:
    """Return how many stages of at most so much a model needs."""
    count = start = 0
    while start < len(sums) - 1:
        start = max(start + 1, bisect_right(sums, sums[start] + most) - 1)
        count += 1
    return count


def _fill_slots(pipelining: Pipelining, pipe: int, one: _Pass, again_s: float) -> float:
    """Return the slots of a step in which a rank waits for the pipeline to fill and drain."""
    whole_s = one.whole_s + again_s
    match pipelining.schedule:
        case "interleaved":
            return (pipe - 1) / max(1, pipelining.chunks)
        case "zero_bubble":
            return (pipe - 1) * max(0.0, whole_s - 2 * one.weight_s) / whole_s
        case "zero_bubble_v":
            return (pipe - 1) * max(0.0, whole_s - 3 * one.weight_s) / whole_s
        case "two_bw" | "stash":
            return 0.0
        case _:
            return pipe - 1.0


def _num_alive(pipelining: Pipelining, layout: Layout) -> float:
    """Return the microbatches whose activations the first stage keeps, as whole stages."""
    pipe, count = layout.pipe, layout.num_microbatches
    match pipelining.schedule:
        case "gpipe":
            return count
        case "interleaved":
            return min(count, pipe * (1 + (pipe - 1) / (pipe * max(1, pipelining.chunks))))
        case "message_driven":
            return min(count, 2 * pipe)
        case _:
            return min(count, pipe)


def _weight_bytes(precision: str) -> int:
    return HALF if precision.endswith("_master") else FLOAT


def _mesh(layout: Layout, pipelining: Pipelining) -> Mesh:
    sizes = dict(zip(("data", "pipe", "x", "y", "z"), layout[:5], strict=True))
    return Mesh(**sizes, rank_order=pipelining.rank_order)
