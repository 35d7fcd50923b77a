"""A conv net in the style of LeNet: two convolutions with ReLU and pooling, then linear layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.shapes.amounts import FORMATS, Format, each, fixed
from ganglion.decide.shapes.block import (
    FLOAT,
    HALF,
    MATRIX,
    NUMBER,
    Axes,
    Parameter,
    vector,
)
from ganglion.decide.shapes.described import (
    DescribedActivations,
    DescribedBlock,
    DescribedLayer,
    DescribedModel,
    linear_flops,
)
from ganglion.decide.shapes.mlp import Chain, chain_axes, chain_splits

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
    def convolutions(self) -> list[Convolution]:
        """Both convolutions; the first pads its images, the second does not."""
        first, second = CONV_CHANNELS
        half = self.image_size // 2
        inner = half - KERNEL_SIZE + 1
        return [
            Convolution(
                inputs=self.num_channels,
                outputs=first,
                kernel=KERNEL_SIZE,
                before=self.image_size,
                after=self.image_size,
                pooled=half,
            ),
            Convolution(
                inputs=first,
                outputs=second,
                kernel=KERNEL_SIZE,
                before=half,
                after=inner,
                pooled=inner // 2,
            ),
        ]

    @property
    def widths(self) -> list[int]:
        """Widths before, between and behind the linear layers."""
        last = self.convolutions[-1]
        return [last.outputs * last.pooled**2, *CONV_WIDTHS, self.num_outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Channels in and out; pixels of a side before it, behind it, and behind the pooling if any."""

    inputs: int
    outputs: int
    kernel: int
    before: int
    after: int
    pooled: int

    @property
    def weight_size(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs * self.kernel**2

    @property
    def is_pooled(self) -> bool:
        """Whether pooling follows."""
        return self.pooled < self.after


def describe_conv(shape: ConvShape) -> DescribedModel:
    """Return the two convolutions, each with its pooling, and the three linear layers."""
    axes, chain = chain_axes(shape.num_blocks), Chain(last=shape.num_blocks - 1)
    widths = enumerate(pairwise(shape.widths), start=2)
    return DescribedModel(
        name="conv",
        sample_bytes=shape.num_channels * shape.image_size**2 * FLOAT + NUMBER,
        blocks=(
            *(conv_block(chain, n, conv, axes[n]) for n, conv in enumerate(shape.convolutions)),
            *(
                chain.dense(f"dense.{n}", n, *sizes, axes[n], keeps_result=True)
                for n, sizes in widths
            ),
        ),
        splits=chain_splits("outputs of a layer", [*CONV_CHANNELS, *CONV_WIDTHS]),
    )


def conv_block(chain: Chain, number: int, conv: Convolution, axes: Axes) -> DescribedBlock:
    """Return a convolution with ReLU, and its pooling if it has one."""
    taken, given = axes
    weight = Parameter(
        shape=(conv.outputs, conv.inputs, conv.kernel, conv.kernel),
        axes=(given, taken, None, None),
        role=MATRIX,
    )
    rows = DescribedLayer(parameter=0, input_rows=conv.before**2, output_rows=conv.after**2)
    return DescribedBlock(
        name=f"conv.{number}",
        flops=linear_flops(conv.after**2, conv.weight_size, is_first=number == 0),
        output_elements=conv.outputs * conv.pooled**2,
        parameters=(weight, *vector(conv.outputs, given)),
        layers=(rows,),
        activations=tuple(_conv_activations(form, chain, number, conv, axes) for form in FORMATS),
    )


def _conv_activations(
    form: Format, chain: Chain, number: int, conv: Convolution, axes: Axes
) -> DescribedActivations:
    """Return those of a ReLU, which keeps its result, and of where each maximum was."""
    taken, given = (axis or "" for axis in axes)
    result = each(conv.outputs * conv.after**2 * form.element_bytes, given)
    block = chain.edges(
        form,
        number,
        each(conv.inputs * conv.before**2, taken),
        each(conv.outputs * conv.pooled**2, given),
        (
            *fixed(conv.weight_size * HALF * form.is_autocast, when="x=1 y=1 z=1"),
            *(result * conv.is_pooled),
            *each(conv.outputs * conv.pooled**2 * NUMBER * conv.is_pooled, given),
        ),
    )
    return replace(
        block,
        scratch=((*block.output, *result, *result),),
        keeps_output=not conv.is_pooled,
    )
