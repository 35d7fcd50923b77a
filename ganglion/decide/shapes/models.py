"""The blocks of any built-in model, from its shape.

`tests/single/models/test_memory_model.py` compares the activations with those that autograd saved.
"""

from __future__ import annotations

from ganglion.decide.shapes.block import (
    FLOAT,
    NUMBER,
    BlockActivations,
    BlockCost,
    BlockLayers,
    BlockParameters,
    Layout,
    split_layers,
)
from ganglion.decide.shapes.conv import ConvShape, conv_activations, conv_blocks, conv_parameters
from ganglion.decide.shapes.gpt import GPTShape, gpt_activations, gpt_blocks, gpt_parameters
from ganglion.decide.shapes.mlp import MLPShape, mlp_activations, mlp_blocks, mlp_parameters

ModelShape = GPTShape | MLPShape | ConvShape


def blocks_of(shape: ModelShape, microbatch_size: int) -> list[BlockCost]:
    """Return the cost of every block for one microbatch."""
    match shape:
        case GPTShape():
            return gpt_blocks(shape, microbatch_size)
        case MLPShape():
            return mlp_blocks(shape, microbatch_size)
        case ConvShape():
            return conv_blocks(shape, microbatch_size)


def parameters_of(shape: ModelShape) -> list[BlockParameters]:
    """Return the parameters of every block."""
    match shape:
        case GPTShape():
            return gpt_parameters(shape)
        case MLPShape():
            return mlp_parameters(shape)
        case ConvShape():
            return conv_parameters(shape)


def activations_of(shape: ModelShape, layout: Layout) -> list[BlockActivations]:
    """Return the activations of every block on one rank."""
    match shape:
        case GPTShape():
            return gpt_activations(shape, layout)
        case MLPShape():
            return mlp_activations(shape, layout)
        case ConvShape():
            return conv_activations(shape, layout)


def layers_of(shape: ModelShape, microbatch_size: int) -> list[BlockLayers]:
    """Return the layers of every block that x, y and z split, for one microbatch."""
    positions = [(1, 1)] * shape.num_blocks  # rows a sample has before and behind each block
    if isinstance(shape, GPTShape):
        positions = [(shape.seq_len, shape.seq_len)] * shape.num_blocks
    elif isinstance(shape, ConvShape):
        positions[:2] = [(conv.before**2, conv.after**2) for conv in shape.convolutions]
    rows = [(microbatch_size * before, microbatch_size * after) for before, after in positions]
    return split_layers(blocks_of(shape, microbatch_size), parameters_of(shape), rows)


def sample_bytes(shape: ModelShape) -> int:
    """Return the bytes of one sample and its target."""
    match shape:
        case GPTShape():
            return 2 * shape.seq_len * NUMBER
        case MLPShape():
            return shape.num_inputs * FLOAT + NUMBER
        case ConvShape():
            return shape.num_channels * shape.image_size**2 * FLOAT + NUMBER
