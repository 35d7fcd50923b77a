"""What torch's own layers begin with, as descriptions: nothing is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from ganglion.errors import ConfigError
from ganglion.execute.models.blocks import named_buffers, named_parameters
from ganglion.execute.models.initial import Constant, Initial, Normal, Uniform

_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# With the buffers of norms that keep running statistics.
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
