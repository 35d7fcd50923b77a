"""Model shapes: a GPT, an MLP or a conv net in numbers, before any tensor exists.

Models are built from these records, and checks and cost models read them, so that a layout can be
refused without torch. Nothing here depends on a run file, a cluster or a schedule.
"""

from ganglion.decide.shapes.block import (
    FLOAT,
    HALF,
    TABLE,
    BlockActivations,
    BlockCost,
    BlockLayers,
    BlockParameters,
    Layout,
    Parameter,
    SplitLayer,
)
from ganglion.decide.shapes.conv import CONV_CHANNELS, CONV_WIDTHS, ConvShape
from ganglion.decide.shapes.described import DescribedModel
from ganglion.decide.shapes.gpt import GPTShape
from ganglion.decide.shapes.mlp import MLPShape
from ganglion.decide.shapes.models import (
    BuiltShape,
    ModelShape,
    activations_of,
    blocks_of,
    describe_shape,
    layers_of,
    parameters_of,
    sample_bytes,
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
    "BlockParameters",
    "BuiltShape",
    "ConvShape",
    "DescribedModel",
    "GPTShape",
    "Layout",
    "MLPShape",
    "ModelShape",
    "Parameter",
    "SplitLayer",
    "activations_of",
    "blocks_of",
    "describe_shape",
    "layers_of",
    "parameters_of",
    "sample_bytes",
]
