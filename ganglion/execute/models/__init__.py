"""Models: ordinary single-device modules in ordered blocks, their losses and text generation.

Nothing here knows of ranks, except for the cuts by which known models may be split, and the memory
that a rank gives to its part of a model on the meta device.
"""

from ganglion.execute.models.blocks import (
    BlockModel,
    Blocks,
    evaluation_mode,
    named_blocks,
    named_buffers,
    named_parameters,
    tied_names,
)
from ganglion.execute.models.build import (
    build_model,
    build_user_blocks,
    call_function,
    outline_model,
)
from ganglion.execute.models.generate import generate
from ganglion.execute.models.gpt import GPT
from ganglion.execute.models.hugging_face import FAMILIES, hugging_face_blocks, read_config
from ganglion.execute.models.initial import Constant, Initial, InitialWeights, Normal, Uniform
from ganglion.execute.models.losses import LossFn, cross_entropy, loss_function, mse
from ganglion.execute.models.meta import check_memory, lent_memory, make_real
from ganglion.execute.models.small_nets import MLP, ConvNet
from ganglion.execute.models.tensor_cuts import tensor_cuts

__all__ = [
    "FAMILIES",
    "GPT",
    "MLP",
    "BlockModel",
    "Blocks",
    "Constant",
    "ConvNet",
    "Initial",
    "InitialWeights",
    "LossFn",
    "Normal",
    "Uniform",
    "build_model",
    "build_user_blocks",
    "call_function",
    "check_memory",
    "cross_entropy",
    "evaluation_mode",
    "generate",
    "hugging_face_blocks",
    "lent_memory",
    "loss_function",
    "make_real",
    "mse",
    "named_blocks",
    "named_buffers",
    "named_parameters",
    "outline_model",
    "read_config",
    "tensor_cuts",
    "tied_names",
]
