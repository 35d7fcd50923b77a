"""An MLP, and the chains of layers that it shares with a conv net.

Inputs and outputs of a chain are whole; features between its layers are split over x and y in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.shapes.block import (
    FLOAT,
    HALF,
    NUMBER,
    Axes,
    BlockActivations,
    BlockCost,
    BlockParameters,
    Layout,
    linear_cost,
    linear_parameters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """Linear layers with GELU between them, on flattened inputs; one block a layer."""

    num_inputs: int
    num_outputs: int
    num_layers: int
    hidden: int
    bias: bool = True

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can cut between."""
        return self.num_layers

    @property
    def widths(self) -> list[int]:
        """Widths before, between and behind the layers."""
        return [self.num_inputs, *[self.hidden] * (self.num_layers - 1), self.num_outputs]


def mlp_blocks(shape: MLPShape, microbatch_size: int) -> list[BlockCost]:
    """Return one block for each linear layer."""
    return dense_costs(shape.widths, microbatch_size, bias=shape.bias, is_first=True)


def mlp_parameters(shape: MLPShape) -> list[BlockParameters]:
    """Return those of each linear layer."""
    layers = zip(pairwise(shape.widths), chain_axes(shape.num_layers), strict=True)
    return [linear_parameters(*sizes, axes, shape.bias) for sizes, axes in layers]


def mlp_activations(shape: MLPShape, layout: Layout) -> list[BlockActivations]:
    """Return those of each linear layer."""
    if shape.num_layers == 1:
        return [_whole_layer(layout, shape.num_inputs, shape.num_outputs)]
    chain = Chain(layout, last=shape.num_layers - 1)
    layers = enumerate(zip(pairwise(shape.widths), chain_axes(shape.num_layers), strict=True))
    return [chain.dense(number, *sizes, axes) for number, (sizes, axes) in layers]


def _whole_layer(layout: Layout, inputs: int, outputs: int) -> BlockActivations:
    """Return a model of one layer: it cuts whole inputs and gathers whole outputs."""
    rows = layout.microbatch_size
    makes_copy = layout.mesh.y > 1 or layout.precision == "bf16"
    copy = rows * layout.share(inputs, "y") * layout.element_bytes
    return BlockActivations(
        input_bytes=rows * inputs * layout.weight_bytes,
        output_bytes=rows * outputs * layout.element_bytes,
        kept_bytes=rows * (outputs * FLOAT + NUMBER) + FLOAT + copy * makes_copy,
        scratch_bytes=2 * rows * outputs * FLOAT,
        keeps_input=not makes_copy,
    )


# --- chains --------------------------------------------------------------------------------------


def chain_axes(num_layers: int) -> list[Axes]:
    """Return the axes of inputs and outputs of layers that take turns between x and y.

    A single layer takes and gives whole features; it is cut for itself.
    """
    if num_layers == 1:
        return [("y", "x")]
    between: Sequence[str | None] = [("x", "y")[number % 2] for number in range(num_layers - 1)]
    return list(pairwise([None, *between, None]))


def dense_costs(
    widths: Sequence[int], microbatch_size: int, *, bias: bool, is_first: bool
) -> list[BlockCost]:
    """Return a block for each linear layer between two widths."""
    return [
        linear_cost(
            microbatch_size,
            weights=inputs * outputs,
            others=bias * outputs,
            outputs=outputs,
            is_first=is_first and index == 0,
        )
        for index, (inputs, outputs) in enumerate(pairwise(widths))
    ]


@dataclass(frozen=True, slots=True)
class Chain:
    """Activations of layers one after another; block `last` has the loss behind it."""

    layout: Layout
    last: int

    def dense(
        self, number: int, inputs: int, outputs: int, axes: Axes, *, keeps_result: bool = False
    ) -> BlockActivations:
        """Return a linear layer with GELU, or with a ReLU, which keeps its result instead."""
        layout, rows = self.layout, self.layout.microbatch_size
        taken, given = layout.share(inputs, axes[0]), layout.share(outputs, axes[1])
        copy = layout.copies_weights and number > 0  # the gradient of the data is not needed
        kept = inputs * outputs * HALF * copy
        if number == self.last:
            kept += rows * (outputs * FLOAT + NUMBER) + FLOAT
        elif not keeps_result:
            kept += rows * given * layout.element_bytes
        before, after = rows * taken * (number > 0), rows * given
        gradient = taken * given * layout.weight_bytes
        return replace(
            self.block(number, rows * taken, after, kept),
            scratch_bytes=max(
                2 * after * layout.element_bytes, before * layout.element_bytes + gradient
            ),
            rerun_bytes=(before + after) * layout.element_bytes + gradient,
            gradient_bytes=gradient,
            keeps_output=keeps_result and number < self.last,
        )

    def block(self, number: int, taken: int, given: int, kept_bytes: int) -> BlockActivations:
        """Return a block with inputs and outputs of so many elements."""
        layout = self.layout
        element_bytes = layout.element_bytes
        is_cast = number == 0 and layout.precision == "bf16"  # data come in fp32
        return BlockActivations(
            input_bytes=taken * (layout.weight_bytes if number == 0 else element_bytes),
            output_bytes=given * element_bytes,
            kept_bytes=kept_bytes + (taken * element_bytes if is_cast else 0),
            keeps_input=not is_cast,
        )
