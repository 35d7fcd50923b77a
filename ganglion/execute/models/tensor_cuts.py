"""How the layers of known models are split over x and y.

Inside a block features go y -> x -> y, so blocks fit together whatever lies between them. A model
with a block that is not known here is left to the general path, whole activations everywhere: the
two cannot be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from torch import nn

from ganglion.decide.topology import (
    NORMAL,
    TRANSPOSED,
    Cut,
    EmbeddingCut,
    LinearCut,
    ModelCuts,
    NormCut,
    WidthCut,
)
from ganglion.execute.models.attention import Attention
from ganglion.execute.models.convnet import ConvPool
from ganglion.execute.models.cut_table import CutTable, cuts_by_table
from ganglion.execute.models.gpt import Embedding, FeedForward, Head
from ganglion.execute.models.hugging_face_cuts import cuts_of as hugging_face
from ganglion.execute.models.mlp import Dense

_Y = NormCut("y")
_TRANSFORMER: CutTable = MappingProxyType(
    {
        Embedding: {"tokens": EmbeddingCut("x", "y"), "positions": EmbeddingCut(None, "y")},
        Attention: {"norm": _Y, "qkv": NORMAL, "out": TRANSPOSED},
        FeedForward: {"norm": _Y, "up": NORMAL, "down": TRANSPOSED},
        Head: {"norm": _Y, "linear": NORMAL},
    }
)


def tensor_cuts(blocks: Mapping[str, nn.Module]) -> ModelCuts:
    """Return the cuts of a model in blocks; none if there is a block that is not known."""
    for describe in (_transformer, hugging_face, _chain):
        found = describe(blocks)
        if found is not None:
            return found
    return ModelCuts({})


def _transformer(blocks: Mapping[str, nn.Module]) -> ModelCuts | None:
    return cuts_by_table(blocks, _TRANSFORMER, {Attention: _heads}, (Head,))


def _heads(block: nn.Module) -> dict[str, Cut]:
    """Whole groups of heads are dealt: features may divide where groups do not."""
    attention = cast(Attention, block)
    num_groups = attention.out.in_features // (attention.heads_per_group * attention.head_size)
    return {"": WidthCut("x", counts=(("model.kv_heads", num_groups),))}


def _chain(blocks: Mapping[str, nn.Module]) -> ModelCuts | None:
    """Layers one after another: each takes its input as the one before left it."""
    names = [(name, _layer_of(block)) for name, block in blocks.items()]
    if any(layer is None for _, layer in names) or len(names) < 2:
        return None
    cuts: dict[str, Cut] = {}
    axis: str | None = None
    for number, (name, layer) in enumerate(names):
        following = "y" if axis == "x" else "x"
        is_last = number == len(names) - 1
        cuts[f"{name}.{layer}"] = LinearCut(axis, None if is_last else following)
        axis = following
    return ModelCuts(cuts)


def _layer_of(block: nn.Module) -> str | None:
    layers: dict[type[nn.Module], str] = {Dense: "linear", ConvPool: "conv"}
    return next((name for kind, name in layers.items() if isinstance(block, kind)), None)
