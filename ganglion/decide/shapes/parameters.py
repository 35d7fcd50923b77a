"""The parameters of the built-in models by block: shapes, and the axes that split them.

Of O = I W a weight (outputs, inputs) is cut by the axis of O and by that of I; what is left of its
rows is stored in pieces along z, if z divides them (AxoNN-4D, spec B.1):

    gpt         features between blocks over y, inside a block over x
    mlp, conv   whole inputs, then over x and y in turn, whole outputs

The keywords are the fields of the model shapes, so `gpt_parameters(**asdict(shape))` fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.shapes.blocks import CONV_CHANNELS, CONV_WIDTHS
from ganglion.decide.topology import Mesh, Placement, Shard

MATRIX, TABLE, VECTOR = "matrix", "table", "vector"
KERNEL_SIZE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter: its whole shape, and the axis that splits each dim.

    A MATRIX is multiplied with and a TABLE looked up: both are stored in pieces along z. `is_tied`:
    it is the first block's own, held here too. `in_muon`: Muon updates it, AdamW the others.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: str = VECTOR
    is_tied: bool = False
    in_muon: bool = False

    def num_gathered(self, mesh: Mesh) -> int:
        """Return the elements that a rank computes with; refuse sizes that do not divide."""
        return math.prod(self._block_shape(mesh))

    def is_gathered(self, mesh: Mesh) -> bool:
        """Say whether a rank stores less than it computes with."""
        return self.role != VECTOR and mesh.z > 1 and self._block_shape(mesh)[0] % mesh.z == 0

    def num_stored(self, mesh: Mesh) -> int:
        """Return the elements that a rank stores."""
        return self.num_gathered(mesh) // (mesh.z if self.is_gathered(mesh) else 1)

    def _block_shape(self, mesh: Mesh) -> tuple[int, ...]:
        cuts = enumerate(self.axes)
        shards = tuple(Shard(dim, axis) for dim, axis in cuts if axis is not None)
        return Placement(shape=self.shape, shards=shards).local_shape(mesh)


BlockParameters = tuple[Parameter, ...]


def gpt_parameters(
    *,
    vocab_size: int,
    seq_len: int,
    num_layers: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    mlp_hidden: int,
    positions: str = "rotary",
    tied_embedding: bool = False,
    bias: bool = False,
) -> list[BlockParameters]:
    """Return those of the embedding, of attention and MLP of every layer, and of the head."""
    queries = num_heads * head_size
    qkv = queries + 2 * num_kv_heads * head_size
    norm = (Parameter(shape=(hidden,), axes=("y",)),) * (1 + bias)
    attention = (
        *norm,
        *_layer(hidden, qkv, ("y", "x"), bias),
        *_layer(queries, hidden, ("x", "y"), bias),
    )
    mlp = (
        *norm,
        *_layer(hidden, mlp_hidden, ("y", "x"), bias),
        *_layer(mlp_hidden, hidden, ("x", "y"), bias),
    )
    tokens = Parameter(shape=(vocab_size, hidden), axes=("x", "y"), role=TABLE)
    places = Parameter(shape=(seq_len, hidden), axes=(None, "y"), role=TABLE)
    embedding = (tokens, places) if positions == "learned" else (tokens,)
    head = (*norm, replace(tokens, role=MATRIX, is_tied=tied_embedding))
    return [embedding, *[attention, mlp] * num_layers, head]


def mlp_parameters(
    *, num_inputs: int, num_outputs: int, num_layers: int, hidden: int, bias: bool = True
) -> list[BlockParameters]:
    """Return those of each linear layer."""
    widths = [num_inputs, *[hidden] * (num_layers - 1), num_outputs]
    axes = chain_axes(num_layers)
    layers = zip(pairwise(widths), axes, strict=True)
    return [_layer(*sizes, sides, bias) for sizes, sides in layers]


def conv_parameters(
    *, image_size: int, num_channels: int, num_outputs: int
) -> list[BlockParameters]:
    """Return those of the two convolutions and of the three linear layers."""
    channels = (num_channels, *CONV_CHANNELS)
    quarter = (image_size // 2 - 4) // 2
    widths = (CONV_CHANNELS[-1] * quarter**2, *CONV_WIDTHS, num_outputs)
    axes = chain_axes(5)
    convs = zip(pairwise(channels), axes[:2], strict=True)
    layers = zip(pairwise(widths), axes[2:], strict=True)
    return [
        *(_convolution(*sizes, sides) for sizes, sides in convs),
        *(_layer(*sizes, sides, bias=True) for sizes, sides in layers),
    ]


def chain_axes(num_layers: int) -> list[tuple[str | None, str | None]]:
    """Return the axes of inputs and outputs of layers that take turns between x and y.

    A single layer takes and gives whole features; it is cut for itself.
    """
    if num_layers == 1:
        return [("y", "x")]
    between: Sequence[str | None] = [("x", "y")[number % 2] for number in range(num_layers - 1)]
    return list(pairwise([None, *between, None]))


def _layer(
    inputs: int, outputs: int, axes: tuple[str | None, str | None], bias: bool
) -> BlockParameters:
    taken, given = axes
    weight = Parameter(shape=(outputs, inputs), axes=(given, taken), role=MATRIX, in_muon=True)
    return (weight, *_vector(outputs, given) * bias)


def _convolution(inputs: int, outputs: int, axes: tuple[str | None, str | None]) -> BlockParameters:
    taken, given = axes
    weight = Parameter(
        shape=(outputs, inputs, KERNEL_SIZE, KERNEL_SIZE),
        axes=(given, taken, None, None),
        role=MATRIX,
    )
    return (weight, *_vector(outputs, given))


def _vector(size: int, axis: str | None) -> BlockParameters:
    return (Parameter(shape=(size,), axes=(axis,)),)
