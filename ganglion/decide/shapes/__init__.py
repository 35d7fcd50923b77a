"""Model descriptions as data: blocks with their parameters, flops, layers and activations."""

from ganglion.decide.shapes.activations import (
    FLOAT,
    HALF,
    BlockActivations,
    Layout,
    conv_activations,
    gpt_activations,
    mlp_activations,
)
from ganglion.decide.shapes.blocks import (
    CONV_CHANNELS,
    CONV_WIDTHS,
    BlockCost,
    conv_blocks,
    gpt_blocks,
    mlp_blocks,
)
from ganglion.decide.shapes.models import ConvShape, GPTShape, MLPShape, ModelShape
from ganglion.decide.shapes.parameters import (
    TABLE,
    Parameter,
    conv_parameters,
    gpt_parameters,
    mlp_parameters,
)
from ganglion.decide.shapes.split_layers import (
    BlockLayers,
    SplitLayer,
    conv_layers,
    gpt_layers,
    mlp_layers,
)

__all__ = [
    "CONV_CHANNELS",
    "CONV_WIDTHS",
    "FLOAT",
    "HALF",
    "TABLE",
    "BlockActivations",
    "BlockCost",
    "BlockLayers",
    "ConvShape",
    "GPTShape",
    "Layout",
    "MLPShape",
    "ModelShape",
    "Parameter",
    "SplitLayer",
    "conv_activations",
    "conv_blocks",
    "conv_layers",
    "conv_parameters",
    "gpt_activations",
    "gpt_blocks",
    "gpt_layers",
    "gpt_parameters",
    "mlp_activations",
    "mlp_blocks",
    "mlp_layers",
    "mlp_parameters",
]
