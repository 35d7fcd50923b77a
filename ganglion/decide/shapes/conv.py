"""A conv net in the style of LeNet: two convolutions with ReLU and pooling, then linear layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.shapes.block import (
    HALF,
    MATRIX,
    NUMBER,
    Axes,
    BlockActivations,
    BlockCost,
    BlockParameters,
    Layout,
    Parameter,
    linear_parameters,
    vector,
)
from ganglion.decide.shapes.mlp import Chain, chain_axes, dense_costs

CONV_CHANNELS = (6, 16)
CONV_WIDTHS = (120, 84)
KERNEL_SIZE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """A LeNet-style network: two convolutions with pooling, then three linear layers."""

    image_size: int
    num_channels: int
    num_outputs: int

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can cut between."""
        return 5

    @property
    def convolutions(self) -> list[_Convolution]:
        """Both convolutions; the first pads its images, the second does not."""
        first, second = CONV_CHANNELS
        half = self.image_size // 2
        inner = half - KERNEL_SIZE + 1
        return [
            _Convolution(self.num_channels, first, self.image_size, self.image_size, half),
            _Convolution(first, second, half, inner, inner // 2),
        ]

    @property
    def widths(self) -> list[int]:
        """Widths before, between and behind the linear layers."""
        last = self.convolutions[-1]
        return [last.outputs * last.pooled**2, *CONV_WIDTHS, self.num_outputs]


@dataclass(frozen=True, slots=True)
class _Convolution:
    """Channels in and out; pixels of a side before it, behind it, and behind the pooling."""

    inputs: int
    outputs: int
    before: int
    after: int
    pooled: int

    @property
    def weight_size(self) -> int:
        return self.inputs * self.outputs * KERNEL_SIZE**2


def conv_blocks(shape: ConvShape, microbatch_size: int) -> list[BlockCost]:
    """Return the two convolutions, each with its pooling, and the three linear layers."""
    return [
        *(
            _conv_cost(conv, microbatch_size, is_first=number == 0)
            for number, conv in enumerate(shape.convolutions)
        ),
        *dense_costs(shape.widths, microbatch_size, bias=True, is_first=False),
    ]


def _conv_cost(conv: _Convolution, microbatch_size: int, *, is_first: bool) -> BlockCost:
    products = 2 * microbatch_size * conv.after**2 * conv.weight_size
    return BlockCost(
        forward_flops=products,
        input_flops=0 if is_first else products,
        weight_flops=products,
        num_parameters=conv.weight_size + conv.outputs,
        output_elements=microbatch_size * conv.outputs * conv.pooled**2,
    )


def conv_parameters(shape: ConvShape) -> list[BlockParameters]:
    """Return those of the two convolutions and of the three linear layers."""
    axes = chain_axes(shape.num_blocks)
    layers = zip(pairwise(shape.widths), axes[2:], strict=True)
    return [
        *(_conv_parameters(*each) for each in zip(shape.convolutions, axes[:2], strict=True)),
        *(linear_parameters(*sizes, sides, bias=True) for sizes, sides in layers),
    ]


def _conv_parameters(conv: _Convolution, axes: Axes) -> BlockParameters:
    taken, given = axes
    weight = Parameter(
        shape=(conv.outputs, conv.inputs, KERNEL_SIZE, KERNEL_SIZE),
        axes=(given, taken, None, None),
        role=MATRIX,
    )
    return (weight, *vector(conv.outputs, given))


def conv_activations(shape: ConvShape, layout: Layout) -> list[BlockActivations]:
    """Return those of the two convolutions and of the three linear layers."""
    chain, axes = Chain(layout, last=4), chain_axes(shape.num_blocks)
    layers = zip(pairwise(shape.widths), axes[2:], strict=True)
    return [
        *(
            _conv_activations(chain, number, conv, axes[number])
            for number, conv in enumerate(shape.convolutions)
        ),
        *(
            chain.dense(number, *sizes, sides, keeps_result=True)
            for number, (sizes, sides) in enumerate(layers, start=2)
        ),
    ]


def _conv_activations(
    chain: Chain, number: int, conv: _Convolution, axes: Axes
) -> BlockActivations:
    """Return a convolution, ReLU and pooling, which keeps where each maximum was."""
    layout, rows = chain.layout, chain.layout.microbatch_size
    taken, given = layout.share(conv.inputs, axes[0]), layout.share(conv.outputs, axes[1])
    result = rows * given * conv.after**2 * layout.element_bytes
    kept = conv.weight_size * HALF * layout.copies_weights
    kept += result + rows * given * conv.pooled**2 * NUMBER
    elements = (rows * taken * conv.before**2, rows * given * conv.pooled**2)
    block = chain.block(number, *elements, kept)
    return replace(block, scratch_bytes=block.output_bytes + 2 * result)
