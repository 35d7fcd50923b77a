"""Models in numbers, before any tensor exists: descriptions, closed forms, and known names.

Models are built from these records, and checks and cost models read them, so that a layout can be
refused without torch. Nothing here depends on a run file, a cluster or a schedule.
"""

from ganglion.decide.shapes.amounts import FORMATS, Amount, Condition, Format, Term, each, fixed
from ganglion.decide.shapes.block import (
    FLOAT,
    HALF,
    MATRIX,
    TABLE,
    VECTOR,
    BlockActivations,
    BlockCost,
    BlockLayers,
    BlockParameters,
    Layout,
    Parameter,
    SplitLayer,
)
from ganglion.decide.shapes.conv import CONV_CHANNELS, CONV_WIDTHS, ConvShape
from ganglion.decide.shapes.described import (
    DescribedActivations,
    DescribedBlock,
    DescribedLayer,
    DescribedModel,
    Flops,
    Split,
)
from ganglion.decide.shapes.description_file import (
    description_from_json,
    description_to_json,
    is_description,
)
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
from ganglion.decide.shapes.names import (
    FAMILIES,
    KNOWN_MODELS,
    is_model_name,
    named_model,
    nearest_model,
)

__all__ = [
    "CONV_CHANNELS",
    "CONV_WIDTHS",
    "FAMILIES",
    "FLOAT",
    "FORMATS",
    "HALF",
    "KNOWN_MODELS",
    "MATRIX",
    "TABLE",
    "VECTOR",
    "Amount",
    "BlockActivations",
    "BlockCost",
    "BlockLayers",
    "BlockParameters",
    "BuiltShape",
    "Condition",
    "ConvShape",
    "DescribedActivations",
    "DescribedBlock",
    "DescribedLayer",
    "DescribedModel",
    "Flops",
    "Format",
    "GPTShape",
    "Layout",
    "MLPShape",
    "ModelShape",
    "Parameter",
    "Split",
    "SplitLayer",
    "Term",
    "activations_of",
    "blocks_of",
    "describe_shape",
    "description_from_json",
    "description_to_json",
    "each",
    "fixed",
    "is_description",
    "is_model_name",
    "layers_of",
    "named_model",
    "nearest_model",
    "parameters_of",
    "sample_bytes",
]
