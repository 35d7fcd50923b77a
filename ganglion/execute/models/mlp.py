"""MLP: linear layers with GELU between them on flattened inputs, one block a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.shapes import MLPShape
from ganglion.errors import LayoutError
from ganglion.execute.models.blocks import BlockModel
from ganglion.execute.models.initial import Initial, drawn_seed
from ganglion.execute.models.layer_defaults import torch_defaults

Activation = Callable[[Tensor], Tensor]


class Dense(nn.Module):
    """Block: a linear layer, then the activation if there is one."""

    def __init__(
        self, num_inputs: int, num_outputs: int, activation: Activation | None, bias: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, num_inputs) to (batch, num_outputs)."""
        result: Tensor = self.linear(x)
        return result if self.activation is None else self.activation(result)


class FlatDense(Dense):
    """Block: a dense layer on samples of any shape, laid out as one row each."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, ...) to (batch, num_outputs)."""
        rows = x.flatten(1)
        if rows.shape[1] != self.linear.in_features:
            raise LayoutError(
                f"samples of shape {tuple(x.shape[1:])} have {rows.shape[1]} numbers, but the "
                f"layer takes {self.linear.in_features}: build the model for the shape of the data"
            )
        return super().forward(rows)


class MLP(BlockModel):
    """A multi-layer perceptron: (batch, ...) to (batch, num_outputs)."""

    def __init__(self, shape: MLPShape) -> None:
        super().__init__()
        seed = drawn_seed()
        widths = [shape.num_inputs, *[shape.hidden] * (shape.num_layers - 1), shape.num_outputs]
        last = shape.num_layers - 1
        self.layers = nn.ModuleList(
            (FlatDense if index == 0 else Dense)(
                widths[index], widths[index + 1], None if index == last else F.gelu, shape.bias
            )
            for index in range(shape.num_layers)
        )
        self.initialize(seed)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the layers in order."""
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def initial_values(self) -> dict[str, Initial]:
        """Begin as torch's own layers do."""
        return torch_defaults(self.blocks())
