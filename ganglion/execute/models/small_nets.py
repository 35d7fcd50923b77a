"""MLP and ConvNet, and the initial values of torch's own layers that both begin with.

MLP       flattened input -> linear, GELU -> ... -> linear; one block a layer
ConvNet   image of size s -> conv1, padded, and pool: s/2 -> conv2 and pool: (s/2 - 4)/2
          -> linear 120 -> linear 84 -> classes; five blocks, after LeNet
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.shapes import CONV_CHANNELS as CHANNELS
from ganglion.decide.shapes import CONV_WIDTHS as WIDTHS
from ganglion.decide.shapes import ConvShape, MLPShape
from ganglion.errors import ConfigError, LayoutError
from ganglion.execute.models.blocks import BlockModel, named_buffers, named_parameters
from ganglion.execute.models.initial import Constant, Initial, Normal, Uniform, drawn_seed

Activation = Callable[[Tensor], Tensor]
MIN_IMAGE_SIZE = 12
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# With the buffers of running statistics.
_OF_NORMS: Mapping[str, Initial] = {
    "weight": Constant(1.0),
    "bias": Constant(0.0),
    "running_mean": Constant(0.0),
    "running_var": Constant(1.0),
    "num_batches_tracked": Constant(0.0),
}


def torch_defaults(blocks: Mapping[str, nn.Module]) -> dict[str, Initial]:
    """Return the initial values of linear layers, convolutions, norms and embeddings, by name."""
    values: dict[str, Initial] = {}
    for block_name, block in blocks.items():
        for path, module in block.named_modules(prefix=block_name):
            values |= {f"{path}.{own}": value for own, value in _of_layer(path, module).items()}
    first_names = (*named_parameters(blocks), *named_buffers(blocks))
    return {name: values[name] for name in first_names}


def _of_layer(path: str, module: nn.Module) -> dict[str, Initial]:
    tensors = {**module._parameters, **module._buffers}
    own = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not own:
        return {}
    if isinstance(module, _PRODUCTS):
        # kaiming_uniform_ with a = sqrt(5), whatever the layer's activation.
        bound = 1.0 / math.sqrt(max(1, own["weight"][0].numel()))
        return dict.fromkeys(own, Uniform(bound))
    if isinstance(module, _NORMS):
        return {name: _OF_NORMS[name] for name in own}
    if isinstance(module, nn.Embedding):
        return {"weight": Normal(1.0)}
    raise ConfigError(
        f"{path} is a {type(module).__name__}, whose initial values are not known: describe them "
        f"in `initial_values()`, or build the model with its weights"
    )


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


class ConvPool(nn.Module):
    """Block: 5x5 convolution, ReLU, and the maximum of each 2x2 square."""

    def __init__(self, num_inputs: int, num_outputs: int, padding: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_inputs, num_outputs, kernel_size=5, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, rows, columns) to more channels of half the size."""
        return F.max_pool2d(F.relu(self.conv(x)), kernel_size=2)


class ConvNet(BlockModel):
    """A convolutional classifier: (batch, channels, size, size) to (batch, num_outputs)."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        size = shape.image_size
        if size < MIN_IMAGE_SIZE:
            raise LayoutError(
                f'images of {size}x{size} pixels are too small for model.kind = "conv": two 5x5 '
                f"convolutions with pooling need at least {MIN_IMAGE_SIZE}x{MIN_IMAGE_SIZE}; use "
                f'larger images or model.kind = "mlp"'
            )
        seed = drawn_seed()
        pixels = ((size // 2 - 4) // 2) ** 2
        self.conv1 = ConvPool(shape.num_channels, CHANNELS[0], padding=2)
        self.conv2 = ConvPool(CHANNELS[0], CHANNELS[1], padding=0)
        self.linear1 = FlatDense(CHANNELS[1] * pixels, WIDTHS[0], F.relu)
        self.linear2 = Dense(WIDTHS[0], WIDTHS[1], F.relu)
        self.linear3 = Dense(WIDTHS[1], shape.num_outputs, None)
        self.initialize(seed)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the two convolutions, then the three linear layers."""
        return dict(self.named_children())

    def initial_values(self) -> dict[str, Initial]:
        """Begin as torch's own layers do."""
        return torch_defaults(self.blocks())
