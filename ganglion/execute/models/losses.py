"""Losses of an output and its target, averaged over all positions.

Computed in fp32 at least: bf16 outputs are widened first, doubles stay doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ganglion.errors import ConfigError, LayoutError
from ganglion.reference import load_function

LossFn = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all positions: logits (..., classes) and class numbers (...)."""
    if output.shape[:-1] != target.shape:
        raise LayoutError(
            f"cross_entropy got an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(target.shape)}: the target must be {tuple(output.shape[:-1])}, one class "
            f"number for each row of logits"
        )
    return F.cross_entropy(_wide(output.flatten(0, -2)), target.flatten())


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared difference of two tensors of one shape."""
    if output.shape != target.shape:
        raise LayoutError(
            f"mse got an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(target.shape)}: make them equal, they are not broadcast"
        )
    return F.mse_loss(_wide(output), _wide(target))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


_LOSSES: Mapping[str, LossFn] = MappingProxyType({"cross_entropy": cross_entropy, "mse": mse})


def loss_function(name: str) -> LossFn:
    """Return the loss that `model.loss` names: a built-in one or "package.module:function"."""
    if name in _LOSSES:
        return _LOSSES[name]
    if ":" in name:
        return cast(LossFn, load_function(name, "model.loss"))
    raise ConfigError(
        f"model.loss = {name!r} is neither one of {list(_LOSSES)} nor of the form "
        f'"package.module:function"'
    )
