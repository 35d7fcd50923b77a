"""Models: ordinary single-device modules in ordered blocks, their losses and text generation."""

from ganglion.models.blocks import (
    BlockModel,
    Blocks,
    evaluation_mode,
    named_blocks,
    named_buffers,
    named_parameters,
    tied_names,
)
from ganglion.models.build import (
    build_model,
    build_user_blocks,
    call_function,
    outline_model,
)
from ganglion.models.convnet import ConvNet
from ganglion.models.generate import generate
from ganglion.models.gpt import GPT
from ganglion.models.initial import Constant, Initial, InitialWeights, Normal, Uniform
from ganglion.models.losses import LossFn, cross_entropy, loss_function, mse
from ganglion.models.mlp import MLP
from ganglion.models.tensor_cuts import tensor_cuts
from ganglion.reference import load_function

__all__ = [
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
    "cross_entropy",
    "evaluation_mode",
    "generate",
    "load_function",
    "loss_function",
    "mse",
    "named_blocks",
    "named_buffers",
    "named_parameters",
    "outline_model",
    "tensor_cuts",
    "tied_names",
]
