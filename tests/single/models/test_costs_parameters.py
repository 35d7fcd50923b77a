"""Cost models and real models agree: parameters, and what each block passes on."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from ganglion.decide.shapes import ConvShape, GPTShape, MLPShape, ModelShape, blocks_of
from ganglion.execute.models import build_model

BATCH = 3
GPT = GPTShape(
    vocab_size=17,
    seq_len=5,
    num_layers=2,
    hidden=12,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    mlp_hidden=20,
)
SHAPES: list[ModelShape] = [
    GPT,
    GPTShape(**{**asdict(GPT), "bias": True, "positions": "learned"}),
    GPTShape(**{**asdict(GPT), "tied_embedding": True, "num_kv_heads": 4}),
    MLPShape(num_inputs=7, num_outputs=3, num_layers=3, hidden=5),
    MLPShape(num_inputs=7, num_outputs=3, num_layers=1, hidden=5, bias=False),
    ConvShape(image_size=28, num_channels=1, num_outputs=10),
    ConvShape(image_size=33, num_channels=3, num_outputs=4),
]


def sample(shape: ModelShape) -> torch.Tensor:
    match shape:
        case GPTShape():
            return torch.zeros(BATCH, shape.seq_len, dtype=torch.int64)
        case MLPShape():
            return torch.zeros(BATCH, shape.num_inputs)
        case ConvShape():
            return torch.zeros(BATCH, shape.num_channels, shape.image_size, shape.image_size)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_and_outputs_of_every_block(shape: ModelShape) -> None:
    costs, model = blocks_of(shape, BATCH), build_model(shape)
    blocks = list(model.blocks().values())
    counted = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    assert [cost.num_parameters for cost in costs] == counted
    distinct = sum(cost.num_parameters - cost.tied_parameters for cost in costs)
    assert distinct == sum(weight.numel() for weight in model.parameters())
    value, sizes = sample(shape), []
    for block in blocks:
        value = block(value)
        sizes.append(value.numel())
    assert [cost.output_elements for cost in costs] == sizes


@pytest.mark.parametrize("shape", SHAPES)
def test_flop_of_forward_and_backward(shape: ModelShape) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    costs, model = blocks_of(shape, BATCH), build_model(shape)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = model(sample(shape))
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
    assert forward.get_total_flops() == sum(cost.forward_flops for cost in costs)
    assert backward.get_total_flops() == sum(c.input_flops + c.weight_flops for c in costs)
