"""Build a model in blocks from a shape, or with the user's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn

from ganglion.decide.shapes import BuiltShape, ConvShape, GPTShape, MLPShape
from ganglion.errors import ConfigError
from ganglion.execute.models.blocks import BlockModel, Blocks, named_blocks
from ganglion.execute.models.gpt import GPT
from ganglion.execute.models.initial import InitialWeights, drawn_seed
from ganglion.execute.models.small_nets import MLP, ConvNet
from ganglion.reference import current_folder_importable, load_function


def build_model(shape: BuiltShape) -> BlockModel:
    """Return a freshly initialized built-in model of this shape."""
    match shape:
        case GPTShape():
            return GPT(shape)
        case MLPShape():
            return MLP(shape)
        case ConvShape():
            return ConvNet(shape)


def outline_model(shape: BuiltShape) -> tuple[BlockModel, InitialWeights]:
    """Return a built-in model on the meta device, without memory, and its initial weights.

    The weights are those that `build_model` would have drawn.
    """
    seed = drawn_seed()
    with torch.device("meta"):
        model = build_model(shape)
    return model, InitialWeights(model.initial_values(), seed)


def call_function(reference: str, args: Mapping[str, object], *, key: str, args_key: str) -> object:
    """Call a user's function; `key` and `args_key` name the settings in error messages."""
    function = load_function(reference, key)
    _check_arguments(function, args, f"{key} = {reference!r}", args_key)
    with current_folder_importable():
        return function(**args)


def build_user_blocks(reference: str, args: Mapping[str, object]) -> dict[str, nn.Module]:
    """Call the user's `model.build` function with `model.args` and return its blocks by name."""
    result = call_function(reference, args, key="model.build", args_key="model.args")
    try:
        return named_blocks(cast(Blocks, result))
    except ConfigError as error:
        raise ConfigError(
            f"model.build = {reference!r} returned no usable model: {error}"
        ) from error


def _check_arguments(
    function: Callable[..., object], args: Mapping[str, object], setting: str, args_key: str
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some C functions have no signature
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"{args_key} {dict(args)} do not fit {setting}{signature}: {error}; "
            f"change {args_key} to match its parameters"
        ) from error
