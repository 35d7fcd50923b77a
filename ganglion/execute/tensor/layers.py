"""Layers that multiply: linear layers and convolutions, split over x, y and z."""

from __future__ import annotations

from torch import Tensor, nn

from ganglion.errors import LayoutError
from ganglion.execute.comm import Group
from ganglion.execute.tensor.activations import cut, gather
from ganglion.execute.tensor.multiply import Layer, multiply


class SplitProduct(nn.Module):
    """A linear layer or a convolution: input features split over one axis, outputs over another.

    With `takes_whole` it cuts whole activations itself, with `gives_whole` it gathers its output:
    then its neighbours need not know that it is split.
    """

    def __init__(
        self,
        name: str,
        layer: Layer,
        bias: nn.Parameter | None,
        *,
        feature_dim: int,
        in_features: int,
        takes_whole: bool = False,
        gives_whole: bool = False,
    ) -> None:
        """Multiply with the weight of `layer`; `feature_dim` is -1, or 1 for images."""
        super().__init__()
        self.weight = layer.weight.parameter
        self.bias = bias
        self.in_features = in_features  # whole, or this rank's, as it takes them
        self._name = name
        self._layer = layer
        self._feature_dim = feature_dim
        self._cut_group: Group | None = layer.in_group if takes_whole else None
        self._gather_group: Group | None = layer.out_group if gives_whole else None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features of the output, or all of them."""
        if x.shape[self._feature_dim] != self.in_features:
            raise self._misfit(x)
        x = cut(x, self._cut_group, self._feature_dim)
        output = self._images(x) if self._feature_dim == 1 else self._rows(x)
        return gather(output, self._gather_group, self._feature_dim)

    def _rows(self, x: Tensor) -> Tensor:
        output = multiply(x.flatten(0, -2), self._layer).view(*x.shape[:-1], -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _images(self, x: Tensor) -> Tensor:
        output = multiply(x, self._layer)
        if self.bias is None:
            return output
        return output + self.bias.to(output.dtype).view(-1, *[1] * (x.dim() - 2))

    def _misfit(self, x: Tensor) -> LayoutError:
        return LayoutError(
            f"{self._name} takes {self.in_features} features in dim {self._feature_dim}, but got "
            f"activations of shape {tuple(x.shape)}: its cut must fit the layers around it, or "
            f"take whole activations as the layers without a cut do"
        )
