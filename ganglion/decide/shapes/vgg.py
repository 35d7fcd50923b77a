"""VGG-19 (1409.1556, configuration E): 16 convolutions of 3 x 3 and 3 linear layers.

Its dropout keeps a mask of each result and the result itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ganglion.decide.shapes.amounts import FORMATS, each
from ganglion.decide.shapes.block import FLAG, FLOAT, NUMBER
from ganglion.decide.shapes.conv import Convolution, conv_block
from ganglion.decide.shapes.described import DescribedBlock, DescribedModel
from ganglion.decide.shapes.mlp import Chain, chain_axes, chain_splits

_CHANNELS = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)  # pooling ends each group
_WIDTHS = (4096, 4096)
_KERNEL_SIZE = 3
_IMAGE = (3, 224)


def describe_vgg19(num_outputs: int = 1000) -> DescribedModel:
    """Return VGG-19 for images of 3 x 224 x 224."""
    convolutions = _convolutions()
    last = convolutions[-1]
    widths = [last.outputs * last.pooled**2, *_WIDTHS, num_outputs]
    num_blocks = len(convolutions) + len(widths) - 1
    chain, axes = Chain(last=num_blocks - 1), chain_axes(num_blocks)
    blocks = [conv_block(chain, n, conv, axes[n]) for n, conv in enumerate(convolutions)]
    for inputs, outputs in pairwise(widths):
        number = len(blocks)
        name = f"dense.{number}"
        block = chain.dense(name, number, inputs, outputs, axes[number], keeps_result=True)
        blocks.append(block if number == chain.last else _with_dropout(block, outputs))
    return DescribedModel(
        name="vgg19",
        sample_bytes=_IMAGE[0] * _IMAGE[1] ** 2 * FLOAT + NUMBER,
        blocks=tuple(blocks),
        splits=chain_splits("outputs of a layer", [*(c.outputs for c in convolutions), *_WIDTHS]),
    )


def _convolutions() -> list[Convolution]:
    inputs, side = _IMAGE
    found = []
    for group in _CHANNELS:
        for number, outputs in enumerate(group, start=1):
            pooled = side // 2 if number == len(group) else side
            found.append(
                Convolution(
                    inputs=inputs,
                    outputs=outputs,
                    kernel=_KERNEL_SIZE,
                    before=side,
                    after=side,
                    pooled=pooled,
                )
            )
            inputs = outputs
        side //= 2
    return found


def _with_dropout(block: DescribedBlock, outputs: int) -> DescribedBlock:
    """Return a layer whose result is kept for ReLU, beside a mask and the result of dropout."""
    given = block.parameters[0].axes[0] or ""
    held = (
        replace(
            one,
            kept=(
                *one.kept,
                *each(outputs * form.element_bytes, given),
                *each(outputs * FLAG, given),
            ),
            keeps_output=False,  # the next layer keeps it as its input
        )
        for form, one in zip(FORMATS, block.activations, strict=True)
    )
    return replace(block, activations=tuple(held))
