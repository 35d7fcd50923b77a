"""The blocks of any model, from its description or from the closed form of a built-in one.

`tests/single/models/test_memory_model.py` compares the activations with those that autograd saved.
"""

from __future__ import annotations

from functools import lru_cache

from ganglion.decide.shapes.block import (
    BlockActivations,
    BlockCost,
    BlockLayers,
    BlockParameters,
    Layout,
)
from ganglion.decide.shapes.conv import ConvShape, describe_conv
from ganglion.decide.shapes.described import (
    DescribedModel,
    described_activations,
    described_costs,
    described_layers,
)
from ganglion.decide.shapes.gpt import GPTShape, describe_gpt
from ganglion.decide.shapes.mlp import MLPShape, describe_mlp

BuiltShape = GPTShape | MLPShape | ConvShape
ModelShape = BuiltShape | DescribedModel


def describe_shape(shape: ModelShape) -> DescribedModel:
    """Return the description of a model; a description is its own."""
    return shape if isinstance(shape, DescribedModel) else _described(shape)


@lru_cache(maxsize=64)
def _described(shape: BuiltShape) -> DescribedModel:
    match shape:
        case GPTShape():
            return describe_gpt(shape)
        case MLPShape():
            return describe_mlp(shape)
        case ConvShape():
            return describe_conv(shape)


def blocks_of(shape: ModelShape, microbatch_size: int) -> list[BlockCost]:
    """Return the cost of every block for one microbatch."""
    return described_costs(describe_shape(shape), microbatch_size)


def parameters_of(shape: ModelShape) -> list[BlockParameters]:
    """Return the parameters of every block."""
    return [block.parameters for block in describe_shape(shape).blocks]


def activations_of(shape: ModelShape, layout: Layout) -> list[BlockActivations]:
    """Return the activations of every block on one rank."""
    return described_activations(describe_shape(shape), layout)


def layers_of(shape: ModelShape, microbatch_size: int) -> list[BlockLayers]:
    """Return the layers of every block that x, y and z split, for one microbatch."""
    return described_layers(describe_shape(shape), microbatch_size)


def sample_bytes(shape: ModelShape) -> int:
    """Return the bytes of one sample and its target."""
    return describe_shape(shape).sample_bytes
