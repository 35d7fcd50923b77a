"""Split layers on a virtual clock: which of their collectives hide behind products.

One rank's step, microbatch after microbatch, driven as `tensor/` does it: `schedules/buckets`
decides what is gathered when, every axis is one wire, and waiting times are exposed.

    compute   | F0 |  F1  |  F2  |   B2    |   B1    |   B0    |
    z         g0 g1~~ g2~~         ~g1 ~s2~~ ~g0 ~s1~~ ~~s0~~~      gathers, then sums of gradients
                  ^ begun while the product before runs (OAG)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ganglion.decide.costs import LayerTimes, StageTimes
from ganglion.decide.schedules.buckets import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    GatherOrder,
    Use,
    kept_within,
)

BlockTimes = Sequence[LayerTimes]

# The microbatches of the shortest step that can take the place of a longer one.
SHORTEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOverlap:
    """Which collectives may overlap with computation, and which weights stay gathered.

    With `late_sums`, gradients of kept weights are summed after the last backward, as in pipelines,
    and not during it.
    """

    all_reduce: bool = True
    reduce_scatter: bool = True
    all_gather: bool = True
    keep_gathered: bool = False
    keep_bytes: int = 0
    late_sums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStep:
    """A step of one rank: mean times of a microbatch, and of these what waits for collectives.

    `tail_s` is the wait for the last sums, after all microbatches.
    """

    num_microbatches: int
    forward_s: float
    backward_s: float
    forward_wait_s: float
    backward_wait_s: float
    tail_s: float

    @property
    def wait_s(self) -> float:
        """The wait of a microbatch, in the mean."""
        return self.forward_wait_s + self.backward_wait_s

    @property
    def exposed_s(self) -> float:
        """The time in which the step waits for collectives."""
        return self.num_microbatches * self.wait_s + self.tail_s

    @property
    def total_s(self) -> float:
        """The time of the step."""
        return self.num_microbatches * (self.forward_s + self.backward_s) + self.tail_s

    @property
    def compute_s(self) -> float:
        """The time in which the step computes."""
        return self.total_s - self.exposed_s


def tensor_step(
    blocks: Sequence[BlockTimes],
    num_microbatches: int,
    overlap: TensorOverlap,
    *,
    recomputed: Collection[int] = (),
    shortens: bool = True,
) -> TensorStep:
    """Return a step of the layers of a rank in steady state, with the order of gathers known.

    `recomputed` are the numbers of the blocks whose forward runs again in backward. With
    `shortens`, a step of few microbatches takes the place of a longer one, if there the last two of
    them begin alike: then all between begin and pass alike, too.
    """
    count = SHORTEST if shortens else num_microbatches
    while count < num_microbatches:
        driver = _Driver(blocks, overlap, recomputed)
        driver.step(count)
        passes, tail_s = driver.step(count)
        if driver.is_steady:
            between = [passes[-2]] * (num_microbatches - count)
            return _mean([*passes[:-1], *between, passes[-1]], tail_s)
        count *= 2
    driver = _Driver(blocks, overlap, recomputed)
    driver.step(num_microbatches)  # learns what is gathered when, and when weights change
    return _mean(*driver.step(num_microbatches))


def _mean(passes: Sequence[_Pass], tail_s: float) -> TensorStep:
    means = [sum(column) / len(passes) for column in zip(*passes, strict=True)]
    return TensorStep(
        num_microbatches=len(passes),
        forward_s=means[0],
        backward_s=means[1],
        forward_wait_s=means[2],
        backward_wait_s=means[3],
        tail_s=tail_s,
    )


def with_waits(times: StageTimes, step: TensorStep) -> StageTimes:
    """Return the times of a stage with the waits of its layers; the last sums delay the update."""
    return replace(
        times,
        forward_s=times.forward_s + step.forward_wait_s,
        backward_s=times.backward_s + step.backward_wait_s,
        update_s=times.update_s + step.tail_s,
        collective_s=times.collective_s + step.wait_s,
        late_sums_s=step.tail_s,
    )


class _Pass(NamedTuple):
    """Forward and backward of one microbatch, and their waits."""

    forward_s: float
    backward_s: float
    forward_wait_s: float
    backward_wait_s: float


def _is_close(one: dict[object, float], other: dict[object, float]) -> bool:
    """Return whether two states are the same but for rounding."""
    return one.keys() == other.keys() and all(
        math.isclose(busy_s, other[key], rel_tol=1e-9, abs_tol=1e-12) for key, busy_s in one.items()
    )


class _Driver:
    """The state of one rank: its clock, its wires, its gathers and sums."""

    def __init__(
        self, blocks: Sequence[BlockTimes], overlap: TensorOverlap, recomputed: Collection[int]
    ) -> None:
        self._blocks = blocks
        self._overlap = overlap
        self._recomputed = recomputed
        self._layers = {layer.weight: layer for block in reversed(blocks) for layer in block}
        self._kept = _kept(self._layers, overlap)
        self._order = GatherOrder()
        self._now_s = self._compute_s = 0.0
        self._free_s: dict[str, float] = {}  # axis -> when its wire is free
        self._gathered: dict[int, float] = {}  # weight -> when it is gathered
        self._summed: dict[int, float] = {}  # weight -> when its gradient is summed
        self.is_steady = False  # whether the last two microbatches of a step began alike

    def step(self, num_microbatches: int) -> tuple[list[_Pass], float]:
        """Run a step; return its microbatches, and the wait for the last sums."""
        passes: list[_Pass] = []
        begun: dict[object, float] = {}
        before = begun
        for number in range(num_microbatches):
            before, begun = begun, self._begun()
            passes.append(self._microbatch(is_last=number == num_microbatches - 1))
        self.is_steady = num_microbatches > 2 and _is_close(before, begun)
        return passes, self._finish()

    def _microbatch(self, *, is_last: bool) -> _Pass:
        begin_s, self._compute_s = self._now_s, 0.0
        self._forward()
        forward_s, computed_s = self._now_s - begin_s, self._compute_s
        self._backward(is_last=is_last)
        backward_s = self._now_s - begin_s - forward_s
        return _Pass(
            forward_s=forward_s,
            backward_s=backward_s,
            forward_wait_s=max(0.0, forward_s - computed_s),
            backward_wait_s=max(0.0, backward_s - (self._compute_s - computed_s)),
        )

    def _begun(self) -> dict[object, float]:
        """Return all that the rest depends on: how long wires and weights are still busy."""
        places = (("wire", self._free_s), ("gathered", self._gathered), ("summed", self._summed))
        return {
            (place, key): max(0.0, end_s - self._now_s)
            for place, ends in places
            for key, end_s in ends.items()
        }

    def _finish(self) -> float:
        """Wait for the sums of all gradients; then the weights change."""
        end_s = self._now_s
        if self._overlap.late_sums:
            for weight in sorted(self._kept):
                self._begin_sum(self._layers[weight])
        self._now_s = max([self._now_s, *self._summed.values()])
        self._summed.clear()
        self._order.on_change()
        # Gathers that turn out useless are waited for before they are dropped.
        self._now_s = max([self._now_s, *self._gathered.values()])
        self._gathered.clear()
        return self._now_s - end_s

    # --- passes --------------------------------------------------------------------------------

    def _forward(self) -> None:
        for block in self._blocks:
            for layer in block:
                self._output(layer, FORWARD)

    def _backward(self, *, is_last: bool) -> None:
        for number in reversed(range(len(self._blocks))):
            block = self._blocks[number]
            if number in self._recomputed:
                for layer in block:
                    self._output(layer, RECOMPUTE)
            for layer in reversed(block):
                self._gradients(layer, is_last=is_last)

    def _output(self, layer: LayerTimes, phase: str) -> None:
        self._compute(layer.before_s)
        self._use(layer, phase)
        self._compute(layer.product_s)
        if layer.in_axis is not None:
            self._wait(self._send(layer.in_axis, layer.output_s))

    def _gradients(self, layer: LayerTimes, *, is_last: bool) -> None:
        """Run the two products; the one whose sum takes longer goes first."""
        if not layer.of_data:
            self._use(layer, BACKWARD)
        if layer.out_axis is None or layer.of_data:
            self._weight_gradient(layer, is_last=is_last)
            self._compute(0.0 if layer.of_data else layer.product_s)
        else:
            self._compute(layer.product_s)
            summed_s = self._send(layer.out_axis, layer.input_s)
            if not self._overlap.all_reduce:
                self._wait(summed_s)
            self._weight_gradient(layer, is_last=is_last)
            self._wait(summed_s)
        self._compute(layer.after_s)

    def _weight_gradient(self, layer: LayerTimes, *, is_last: bool) -> None:
        self._compute(layer.product_s)
        if not layer.scatter_s or not self._is_summed(layer, is_last):
            return
        self._wait(self._summed.get(layer.weight, 0.0))  # that of the microbatch before
        self._begin_sum(layer)
        if not self._overlap.reduce_scatter:
            self._wait(self._summed[layer.weight])

    def _is_summed(self, layer: LayerTimes, is_last: bool) -> bool:
        """Return whether a gradient is summed now: of a kept weight once, after its last use."""
        if layer.weight not in self._kept:
            return True
        return is_last and not self._overlap.late_sums and layer is self._layers[layer.weight]

    # --- weights -------------------------------------------------------------------------------

    def _use(self, layer: LayerTimes, phase: str) -> None:
        """Wait for a weight to be gathered, and begin to gather the next one."""
        if not layer.gather_s:
            return
        self._begin_gather(layer.weight)
        self._wait(self._gathered[layer.weight])
        if layer.weight not in self._kept:
            del self._gathered[layer.weight]
        following = self._order.on_use(Use(phase, layer.weight))
        if following is not None and self._overlap.all_gather:
            self._begin_gather(following)

    def _begin_gather(self, weight: int) -> None:
        if weight not in self._gathered:
            self._gathered[weight] = self._send("z", self._layers[weight].gather_s)

    def _begin_sum(self, layer: LayerTimes) -> None:
        self._summed[layer.weight] = self._send("z", layer.scatter_s)

    # --- the clock -----------------------------------------------------------------------------

    def _compute(self, seconds: float) -> None:
        self._now_s += seconds
        self._compute_s += seconds

    def _send(self, axis: str, seconds: float) -> float:
        """Put a collective on the wire of an axis; return when it ends."""
        self._free_s[axis] = max(self._now_s, self._free_s.get(axis, 0.0)) + seconds
        return self._free_s[axis]

    def _wait(self, until_s: float) -> None:
        self._now_s = max(self._now_s, until_s)


def _kept(layers: dict[int, LayerTimes], overlap: TensorOverlap) -> Collection[int]:
    """Return the weights that stay gathered until they change."""
    split = [number for number in sorted(layers) if layers[number].gather_s]
    if overlap.keep_gathered:
        return frozenset(split)
    if not overlap.keep_bytes:
        return frozenset()
    fits = kept_within([layers[number].weight_bytes for number in split], overlap.keep_bytes)
    return frozenset(number for number, fit in zip(split, fits, strict=True) if fit)
