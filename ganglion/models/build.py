"""Build: from a shape or from the user's own function to a model in blocks."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

from torch import nn

from ganglion.config.shapes import ConvShape, GPTShape, MLPShape, ModelShape
from ganglion.errors import ConfigError
from ganglion.models.blocks import BlockModel, Blocks, named_blocks
from ganglion.models.convnet import ConvNet
from ganglion.models.gpt import GPT
from ganglion.models.mlp import MLP


def build_model(shape: ModelShape) -> BlockModel:
    """Return a freshly initialized built-in model of this shape."""
    match shape:
        case GPTShape():
            return GPT(shape)
        case MLPShape():
            return MLP(shape)
        case ConvShape():
            return ConvNet(shape)


def load_function(reference: str, key: str) -> Callable[..., object]:
    """Import "package.module:function", the current folder included.

    `key` is the run-file key the reference came from; every error names it.
    """
    setting = f"{key} = {reference!r}"
    module_name, colon, name = reference.partition(":")
    if not colon or not name.isidentifier() or not _is_dotted_name(module_name):
        raise ConfigError(f'{setting} is not of the form "package.module:function"')
    module = _import_module(module_name, setting)
    if not hasattr(module, name):
        raise ConfigError(
            f"{setting}: module {module_name!r} ({_origin(module)}) has nothing named {name!r}; "
            f"check the part after the colon"
        )
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(
            f"{setting}: {name!r} is of type {type(function).__name__} and cannot be called; name "
            f"a function"
        )
    return cast(Callable[..., object], function)


def call_function(reference: str, args: Mapping[str, object], *, key: str, args_key: str) -> object:
    """Call a user's function; `key` and `args_key` name the settings in error messages."""
    function = load_function(reference, key)
    _check_arguments(function, args, f"{key} = {reference!r}", args_key)
    with _current_folder_importable():
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


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _origin(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "built-in")


def _import_module(module_name: str, setting: str) -> ModuleType:
    with _current_folder_importable():
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if f"{module_name}.".startswith(f"{missing}."):
                raise ConfigError(
                    f"{setting}: there is no module {missing!r}; it was looked for in "
                    f"{Path.cwd()} and among the installed packages: run from the folder that "
                    f"holds it, or install it"
                ) from error
            raise ConfigError(
                f"{setting}: module {module_name!r} needs {missing!r}, which is not installed: "
                f"install it"
            ) from error


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    # A module written a moment ago is invisible to finders that listed the folder before.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        # The imported code may have changed the path itself: take out our entry only.
        if folder in sys.path:
            sys.path.remove(folder)


def _check_arguments(
    function: Callable[..., object], args: Mapping[str, object], setting: str, args_key: str
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some C functions have no signature to check: calling them tells
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"{args_key} {dict(args)} do not fit {setting}{signature}: {error}; "
            f"change {args_key} to match its parameters"
        ) from error
