"""Products: what a layer multiplies, and its two gradients; each computes on local blocks only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = tuple[int, ...]


class Product(Protocol):
    """One bilinear operation of activations and a weight."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of `x`, from that of the product."""

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        """Return the gradient of a weight of some shape: its numbers are not needed."""


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
