"""Products of activations and a weight with their two gradients, on local blocks only.

A `Form` is the product of a module, and which dims of the weight are its outputs and inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sizes = tuple[int, ...]
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Conv = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)


class Product(Protocol):
    """A bilinear operation of activations and a weight."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of `x`, from that of the product."""

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        """Return the gradient of a weight of a shape; its values are not needed."""


class LinearProduct:
    """Rows times a weight of (outputs, inputs), as in nn.Linear."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""
        return F.linear(x, weight)

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        return gradient @ weight

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        """Return the gradient of the weight."""
        return gradient.flatten(0, -2).T @ x.flatten(0, -2)


class FlippedProduct:
    """Rows times a weight of (inputs, outputs), as in the Conv1D of Hugging Face's GPT-2."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""
        return x @ weight

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        return F.linear(gradient, weight)

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        """Return the gradient of the weight."""
        return x.flatten(0, -2).T @ gradient.flatten(0, -2)


@dataclass(frozen=True, slots=True)
class ConvProduct:
    """Images of (batch, channels, places...) with kernels of (outputs, inputs, places...).

    A transposed convolution has kernels of (inputs, outputs, places...).
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution."""
        return torch.convolution(x, weight, None, *self._how())

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        return self._gradients(gradient, x, weight, (True, False, False))[0]

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        """Return the gradient of the kernels."""
        no_numbers = gradient.new_empty(1).expand(shape)  # as torch.nn.grad.conv2d_weight does
        return self._gradients(gradient, x, no_numbers, (False, True, False))[1]

    def _how(self) -> tuple[Sizes, Sizes, Sizes, bool, Sizes, int]:
        rest = self.output_padding or (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, self.transposed, rest, 1

    def _gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, *self._how(), wanted
        )
        return found


@dataclass(frozen=True, slots=True)
class Form:
    """A product, the dims of outputs and inputs in its weight, and of features in activations."""

    product: Product
    out_dim: int = 0
    in_dim: int = 1
    feature_dim: int = -1


def form_of(module: nn.Module) -> Form | None:
    """Return the form of a module; None if it multiplies nothing or cannot be split."""
    if isinstance(module, nn.Linear):
        return Form(LinearProduct())
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of Hugging Face's GPT-2
        return Form(FlippedProduct(), out_dim=1, in_dim=0)
    if not isinstance(module, (*_CONVS, *_TRANSPOSED)) or why_not_split(module) is not None:
        return None
    transposed = isinstance(module, _TRANSPOSED)
    product = ConvProduct(
        tuple(module.stride),
        _padding(module),
        tuple(module.dilation),
        transposed,
        tuple(module.output_padding),
    )
    return Form(product, *((1, 0) if transposed else (0, 1)), feature_dim=1)


def why_not_split(module: nn.Module) -> str | None:
    """Return why a convolution cannot be split; None if it can, or is no convolution."""
    if not isinstance(module, (*_CONVS, *_TRANSPOSED)):
        return None
    if module.groups > 1:
        return f"its {module.groups} groups of channels do not mix, which no split product knows"
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r} pads with more than zeros"
    if module.padding == "same" and any(total % 2 for total in _same_padding(module)):
        return 'padding="same" with an even kernel pads its two sides differently'
    return None


def _padding(module: Conv) -> tuple[int, ...]:
    if module.padding == "same":
        return tuple(total // 2 for total in _same_padding(module))
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    return tuple(int(size) for size in module.padding)


def _same_padding(module: Conv) -> tuple[int, ...]:
    """Return the padding of each dim, both sides together."""
    sizes = zip(module.dilation, module.kernel_size, strict=True)
    return tuple(dilation * (size - 1) for dilation, size in sizes)
