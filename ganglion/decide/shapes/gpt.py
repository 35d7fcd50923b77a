"""A GPT: features between blocks are split over y, inside a block over x.

Autograd saves these tensors of its blocks, each piece of memory once:

    attention   input  mean 1/std | norm  queries keys  qkv (values)  sums  mixed
    MLP         input  mean 1/std | norm  up  gelu
    head        input  mean 1/std | norm  log-softmax  targets

Values are a view, so all of qkv lives as long as they do. A norm over split features keeps its
result in the place of its input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ganglion.decide.shapes.block import (
    FLAG,
    FLOAT,
    HALF,
    MATRIX,
    NUMBER,
    TABLE,
    BlockActivations,
    BlockCost,
    BlockParameters,
    Layout,
    Parameter,
    linear_cost,
    linear_parameters,
    vector,
)
from ganglion.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """A decoder-only transformer; two blocks a layer (attention, MLP) and one at each end."""

    vocab_size: int
    seq_len: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_hidden: int
    positions: str = "rotary"
    tied_embedding: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise LayoutError(
                f"model.heads = {self.num_heads} is not a multiple of model.kv_heads = "
                f"{self.num_kv_heads}: each key head serves the same number of query heads"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise LayoutError(
                f"model.head_size = {self.head_size} is odd, but rotary positions turn pairs: "
                f'choose an even head_size or model.positions = "learned"'
            )

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can cut between."""
        return 2 * self.num_layers + 2

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Width of queries, keys and values of all heads."""
        return self.query_size + 2 * self.num_kv_heads * self.head_size


def gpt_blocks(shape: GPTShape, microbatch_size: int) -> list[BlockCost]:
    """Return embedding, attention and MLP of every layer, and head.

    Attention counts all pairs of tokens, as 2104.04473 does, though a causal kernel may skip half.
    """
    hidden, bias = shape.hidden, shape.bias
    rows, norm = microbatch_size * shape.seq_len, hidden * (1 + bias)
    embedding = BlockCost(
        forward_flops=0,
        input_flops=0,
        weight_flops=0,
        num_parameters=hidden
        * (shape.vocab_size + (shape.seq_len if shape.positions == "learned" else 0)),
        output_elements=rows * hidden,
    )
    attention = linear_cost(
        rows,
        weights=hidden * (shape.qkv_size + shape.query_size),
        others=norm + bias * (shape.qkv_size + hidden),
        outputs=hidden,
        activation_flops=4 * rows * shape.seq_len * shape.query_size,
    )
    mlp = linear_cost(
        rows,
        weights=2 * hidden * shape.mlp_hidden,
        others=norm + bias * (shape.mlp_hidden + hidden),
        outputs=hidden,
    )
    head = linear_cost(
        rows,
        weights=hidden * shape.vocab_size,
        others=norm,
        outputs=shape.vocab_size,
        tied=hidden * shape.vocab_size if shape.tied_embedding else 0,
    )
    return [embedding, *[attention, mlp] * shape.num_layers, head]


def gpt_parameters(shape: GPTShape) -> list[BlockParameters]:
    """Return those of the embedding, of attention and MLP of every layer, and of the head."""
    hidden, bias = shape.hidden, shape.bias
    norm = vector(hidden, "y") * (1 + bias)
    attention = (
        *norm,
        *linear_parameters(hidden, shape.qkv_size, ("y", "x"), bias),
        *linear_parameters(shape.query_size, hidden, ("x", "y"), bias),
    )
    mlp = (
        *norm,
        *linear_parameters(hidden, shape.mlp_hidden, ("y", "x"), bias),
        *linear_parameters(shape.mlp_hidden, hidden, ("x", "y"), bias),
    )
    tokens = Parameter(shape=(shape.vocab_size, hidden), axes=("x", "y"), role=TABLE)
    learned = Parameter(shape=(shape.seq_len, hidden), axes=(None, "y"), role=TABLE)
    embedding = (tokens, learned) if shape.positions == "learned" else (tokens,)
    head = (*norm, replace(tokens, role=MATRIX, is_tied=shape.tied_embedding))
    return [embedding, *[attention, mlp] * shape.num_layers, head]


def gpt_activations(shape: GPTShape, layout: Layout) -> list[BlockActivations]:
    """Return those of the embedding, of attention and MLP of every layer, and of the head."""
    held = _Activations(shape, layout)
    layer = [held.attention(), held.mlp()]
    return [held.embedding(), *layer * shape.num_layers, held.head()]


@dataclass(frozen=True, slots=True)
class _Activations:
    """The activations of each kind of block."""

    shape: GPTShape
    layout: Layout

    @property
    def _rows(self) -> int:
        return self.layout.microbatch_size * self.shape.seq_len

    @property
    def _edge_bytes(self) -> int:
        return self._rows * self.layout.share(self.shape.hidden, "y") * self.layout.weight_bytes

    @property
    def _norm_bytes(self) -> int:
        """The result of a norm for the layer behind it, and the tensors of its own backward."""
        rows, width = self._rows, self.layout.share(self.shape.hidden, "y")
        result = rows * width * self.layout.element_bytes
        if self.layout.mesh.y == 1:
            return result + 2 * rows * self.layout.weight_bytes
        return result + rows * width * FLOAT + rows * FLOAT

    def embedding(self) -> BlockActivations:
        shape, rows, is_split = self.shape, self._rows, self.layout.mesh.x > 1
        indices = shape.seq_len * NUMBER * (shape.positions == "learned")
        table = self.layout.share(shape.vocab_size, "x") * self.layout.share(shape.hidden, "y")
        gradient = table * self.layout.weight_bytes
        return BlockActivations(
            input_bytes=rows * NUMBER,
            output_bytes=self._edge_bytes,
            kept_bytes=indices + (rows * (NUMBER + FLAG) if is_split else 0),
            keeps_input=not is_split,
            scratch_bytes=self._edge_bytes + gradient,
            rerun_bytes=self._edge_bytes + gradient,
            gradient_bytes=gradient,
        )

    def attention(self) -> BlockActivations:
        layout, rows, hidden = self.layout, self._rows, self.shape.hidden
        heads = layout.share(self.shape.num_heads, "x")
        groups = layout.share(self.shape.num_kv_heads, "x")
        queries = heads * self.shape.head_size
        qkv = queries + 2 * groups * self.shape.head_size
        if self.shape.positions == "rotary":
            copied = queries + groups * self.shape.head_size
        else:  # queries are views too, unless several groups of several lie apart
            copied = queries * (heads > groups > 1)
        inside = rows * (qkv + copied + queries) * layout.element_bytes + rows * heads * FLOAT
        mixed, joined = (rows * width * layout.element_bytes for width in (queries, qkv))
        weight = self._weight_bytes(hidden * queries)  # of the layer behind, made before
        block = self._residual(
            inside,
            weights=(hidden * qkv, hidden * queries),
            gradients=mixed + max(joined, weight),
            widest=joined,
        )
        return replace(block, held_bytes=min(joined, weight) + 2 * rows * heads * FLOAT)

    def mlp(self) -> BlockActivations:
        width = self.layout.share(self.shape.mlp_hidden, "x")
        wide = self._rows * width * self.layout.element_bytes
        weight = self.shape.hidden * width
        return self._residual(
            2 * wide,
            weights=(weight, weight),
            gradients=wide + self._weight_bytes(weight),
            widest=wide,
        )

    def head(self) -> BlockActivations:
        layout, rows = self.layout, self._rows
        share = layout.share(self.shape.vocab_size, "x")
        logs = rows * share * FLOAT
        ends = rows * NUMBER + FLOAT if layout.mesh.x == 1 else rows * (NUMBER + 2 * FLAG) + NUMBER
        weight = self.shape.hidden * share
        block = self._residual(logs + ends, weights=(weight,), gradients=0, widest=logs)
        return replace(
            block,
            output_bytes=rows * share * layout.element_bytes,
            # Gradients of the loss and of the logits; later, with the former gone, of the weight.
            scratch_bytes=max(2 * logs, self._edge_bytes + self._weight_bytes(weight)),
        )

    def _weight_bytes(self, elements: int) -> int:
        """Return the bytes of the gradient of a weight that x has split already."""
        return elements // self.layout.mesh.y * self.layout.element_bytes

    def _residual(
        self, inside_bytes: int, *, weights: tuple[int, ...], gradients: int, widest: int
    ) -> BlockActivations:
        """Return a block that begins with a norm, with outputs like its inputs."""
        layout, edge = self.layout, self._edge_bytes
        copies = sum(weights) * HALF if layout.copies_weights else 0
        rounded = edge // 2 if layout.precision == "bf16" else 0
        # Of weights in pieces along z, gradients are sent off one by one.
        made = sum(weights) // layout.mesh.y * layout.weight_bytes if layout.mesh.z == 1 else 0
        return BlockActivations(
            input_bytes=edge,
            output_bytes=edge,
            kept_bytes=self._norm_bytes + inside_bytes + copies,
            scratch_bytes=edge + rounded + gradients,
            rerun_bytes=made + widest + 3 * edge,
            gradient_bytes=made,
            keeps_input=layout.mesh.y == 1,
        )
