"""The layers of a model that x, y and z split: sizes of their products, and of what they exchange.

One list of layers for every block. A layer is O = I W, or a lookup in a table, which is a product
with rows that are mostly zeros: its inputs are split over the axis of the table's rows.

    weight (outputs, inputs)    axes (of O, of I)
    table (rows, features)      axes (of I, of O)

The keywords are the fields of the model shapes, so `gpt_layers(**asdict(shape), ...)` fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ganglion.decide.shapes.blocks import BlockCost, conv_blocks, gpt_blocks, mlp_blocks
from ganglion.decide.shapes.parameters import (
    TABLE,
    VECTOR,
    BlockParameters,
    Parameter,
    conv_parameters,
    gpt_parameters,
    mlp_parameters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """One layer and one microbatch, whole.

    `product_flops` is what each product of forward and backward costs; `before_flops` and
    `after_flops` what a block computes otherwise before the layer in forward, and after it in
    backward. Of a layer `of_data` the inputs need no gradient.
    """

    parameter: Parameter
    num_inputs: int
    num_outputs: int
    product_flops: float
    before_flops: float = 0.0
    after_flops: float = 0.0
    of_data: bool = False

    @property
    def in_axis(self) -> str | None:
        """The axis that splits the inputs: partial outputs are summed over it."""
        return self.parameter.axes[0 if self.parameter.role == TABLE else 1]

    @property
    def out_axis(self) -> str | None:
        """The axis that splits the outputs: partial gradients of the inputs are summed over it."""
        return self.parameter.axes[1 if self.parameter.role == TABLE else 0]


BlockLayers = tuple[SplitLayer, ...]
_Rows = tuple[int, int]  # of the inputs and of the outputs: samples times places


def gpt_layers(*, microbatch_size: int, seq_len: int, **shape: Any) -> list[BlockLayers]:
    """Return those of the embedding, of attention and MLP of every layer, and of the head."""
    blocks = gpt_blocks(microbatch_size=microbatch_size, seq_len=seq_len, **shape)
    parameters = gpt_parameters(seq_len=seq_len, **shape)
    rows = microbatch_size * seq_len
    return _layers(blocks, parameters, [(rows, rows)] * len(blocks))


def mlp_layers(*, microbatch_size: int, **shape: Any) -> list[BlockLayers]:
    """Return that of each block."""
    blocks = mlp_blocks(microbatch_size=microbatch_size, **shape)
    rows = (microbatch_size, microbatch_size)
    return _layers(blocks, mlp_parameters(**shape), [rows] * len(blocks))


def conv_layers(*, microbatch_size: int, image_size: int, **shape: Any) -> list[BlockLayers]:
    """Return that of each block."""
    blocks = conv_blocks(microbatch_size=microbatch_size, image_size=image_size, **shape)
    half = image_size // 2
    places = [(image_size**2, image_size**2), (half**2, (half - 4) ** 2), *[(1, 1)] * 3]
    rows = [(microbatch_size * taken, microbatch_size * given) for taken, given in places]
    return _layers(blocks, conv_parameters(image_size=image_size, **shape), rows)


def _layers(
    blocks: Sequence[BlockCost], parameters: Sequence[BlockParameters], rows: Sequence[_Rows]
) -> list[BlockLayers]:
    is_first = [True, *[False] * (len(blocks) - 1)]
    return [_of_block(*each) for each in zip(blocks, parameters, rows, is_first, strict=True)]


def _of_block(
    block: BlockCost, parameters: BlockParameters, rows: _Rows, is_first: bool
) -> BlockLayers:
    """Return the layers of a block; what else it computes is done before the last of them."""
    weights = [parameter for parameter in parameters if parameter.role != VECTOR]
    flops = [_product_flops(weight, rows) for weight in weights]
    left = block.forward_flops - sum(flops)
    left_back = 0.0 if is_first else block.input_flops - sum(flops)
    last = len(weights) - 1
    return tuple(
        _layer(
            weight,
            rows,
            before=left if number == last else 0.0,
            after=left_back if number == last else 0.0,
            of_data=is_first,
        )
        for number, weight in enumerate(weights)
    )


def _layer(
    parameter: Parameter, rows: _Rows, *, before: float, after: float, of_data: bool
) -> SplitLayer:
    if parameter.role == TABLE:
        inputs, outputs = 0, parameter.shape[1]
    else:
        outputs, inputs = parameter.shape[:2]
    return SplitLayer(
        parameter=parameter,
        num_inputs=rows[0] * inputs,
        num_outputs=rows[1] * outputs,
        product_flops=_product_flops(parameter, rows),
        before_flops=before,
        after_flops=after,
        of_data=of_data,
    )


def _product_flops(parameter: Parameter, rows: _Rows) -> float:
    return 0.0 if parameter.role == TABLE else 2.0 * rows[1] * math.prod(parameter.shape)
