"""ConvNet: a LeNet-style image classifier in five blocks.

image of size s -> conv1, padded, and pool: s/2 -> conv2 and pool: (s/2 - 4)/2
                -> linear 120 -> linear 84 -> classes
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.shapes import CONV_CHANNELS as CHANNELS
from ganglion.decide.shapes import CONV_WIDTHS as WIDTHS
from ganglion.decide.shapes import ConvShape
from ganglion.errors import LayoutError
from ganglion.execute.models.blocks import BlockModel
from ganglion.execute.models.initial import Initial, drawn_seed
from ganglion.execute.models.layer_defaults import torch_defaults
from ganglion.execute.models.mlp import Dense, FlatDense

MIN_IMAGE_SIZE = 12


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
