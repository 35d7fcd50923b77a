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

from ganglion.decide.shapes.amounts import FORMATS, Amount, Condition, Format, each, fixed
from ganglion.decide.shapes.block import (
    FLAG,
    FLOAT,
    HALF,
    MATRIX,
    NUMBER,
    TABLE,
    Parameter,
    linear_parameters,
    vector,
)
from ganglion.decide.shapes.described import (
    DescribedActivations,
    DescribedBlock,
    DescribedModel,
    Flops,
    Split,
    layers_of_all,
    linear_flops,
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


def describe_gpt(shape: GPTShape) -> DescribedModel:
    """Return the embedding, attention and MLP of every layer, and the head.

    Attention counts all pairs of tokens, as 2104.04473 does, though a causal kernel may skip half.
    """
    return describe_transformer("gpt", shape, GPTBlocks(shape))


def describe_transformer(name: str, shape: GPTShape, kinds: GPTBlocks) -> DescribedModel:
    """Return the model of these kinds of blocks."""
    layer = [kinds.attention(), kinds.mlp()]
    splits = {
        "heads": ("x", shape.num_heads),
        "kv_heads": ("x", shape.num_kv_heads),
        "mlp_hidden": ("x", shape.mlp_hidden),
        "vocab": ("x", shape.vocab_size),
        "hidden": ("y", shape.hidden),
    }
    return DescribedModel(
        name=name,
        sample_bytes=2 * shape.seq_len * NUMBER,
        blocks=(kinds.embedding(), *layer * shape.num_layers, kinds.head()),
        tokens=shape.seq_len,
        splits=tuple(Split(axis=at, name=name, size=n) for name, (at, n) in splits.items()),
    )


@dataclass(frozen=True, slots=True)
class GPTBlocks:
    """Each kind of block; other transformers change some of them."""

    shape: GPTShape

    def embedding(self) -> DescribedBlock:
        """Return the tables of tokens and of learned positions."""
        shape, learned = self.shape, self.shape.positions == "learned"
        tokens = Parameter(shape=(shape.vocab_size, shape.hidden), axes=("x", "y"), role=TABLE)
        places = Parameter(shape=(shape.seq_len, shape.hidden), axes=(None, "y"), role=TABLE)
        parameters = (tokens, places) if learned else (tokens,)
        return DescribedBlock(
            name="embedding",
            flops=Flops(),
            output_elements=shape.seq_len * shape.hidden,
            parameters=parameters,
            layers=layers_of_all(parameters, (shape.seq_len, shape.seq_len)),
            activations=tuple(map(self.embedding_activations, FORMATS)),
        )

    def attention(self) -> DescribedBlock:
        """Return the attention of a layer."""
        shape = self.shape
        hidden, inner = shape.hidden, shape.query_size
        return self.block(
            "attention",
            (
                *linear_parameters(hidden, shape.qkv_size, ("y", "x"), shape.bias),
                *linear_parameters(inner, hidden, ("x", "y"), shape.bias),
            ),
            weights=hidden * (shape.qkv_size + inner),
            mixing=4 * shape.seq_len**2 * inner,
            activations=tuple(map(self.attention_activations, FORMATS)),
        )

    def mlp(self) -> DescribedBlock:
        """Return the MLP of a layer."""
        hidden, inner, bias = self.shape.hidden, self.shape.mlp_hidden, self.shape.bias
        return self.block(
            "mlp",
            (
                *linear_parameters(hidden, inner, ("y", "x"), bias),
                *linear_parameters(inner, hidden, ("x", "y"), bias),
            ),
            weights=2 * hidden * inner,
            activations=tuple(map(self.mlp_activations, FORMATS)),
        )

    def head(self) -> DescribedBlock:
        """Return the last norm, and the scores of all tokens."""
        shape = self.shape
        tokens = Parameter(
            shape=(shape.vocab_size, shape.hidden),
            axes=("x", "y"),
            role=MATRIX,
            is_tied=shape.tied_embedding,
        )
        block = self.block(
            "head",
            (tokens,),
            weights=shape.hidden * shape.vocab_size,
            activations=tuple(map(self.head_activations, FORMATS)),
        )
        return replace(block, output_elements=shape.seq_len * shape.vocab_size)

    def block(
        self,
        name: str,
        behind_norm: tuple[Parameter, ...],
        *,
        weights: int,
        activations: tuple[DescribedActivations, ...],
        mixing: int = 0,
    ) -> DescribedBlock:
        """Return a block that begins with a norm, with outputs like its inputs."""
        shape, rows = self.shape, self.shape.seq_len
        parameters = (*vector(shape.hidden, "y") * (1 + shape.bias), *behind_norm)
        return DescribedBlock(
            name=name,
            flops=linear_flops(rows, weights, mixing=mixing),
            output_elements=rows * shape.hidden,
            parameters=parameters,
            layers=layers_of_all(parameters, (rows, rows)),
            activations=activations,
        )

    # --- activations -----------------------------------------------------------------------------

    def edge(self, form: Format) -> Amount:
        """Return the stream between blocks."""
        return each(self.shape.seq_len * self.shape.hidden * form.weight_bytes, "y")

    def norm(self, form: Format) -> Amount:
        """Return the result of a norm for the layer behind it, and what its own backward needs."""
        rows, width = self.shape.seq_len, self.shape.seq_len * self.shape.hidden
        return (
            *each(width * form.element_bytes, "y"),
            *each(2 * rows * form.weight_bytes, when="y=1"),
            *each(width * FLOAT, "y", when="y>1"),
            *each(rows * FLOAT, when="y>1"),
        )

    def embedding_activations(self, form: Format) -> DescribedActivations:
        """Return what the embedding keeps: its indices."""
        shape, rows = self.shape, self.shape.seq_len
        edge, indices = self.edge(form), rows * NUMBER * (shape.positions == "learned")
        gradient = fixed(shape.vocab_size * shape.hidden * form.weight_bytes, "x y")
        return DescribedActivations(
            input=each(rows * NUMBER),
            output=edge,
            kept=(*fixed(indices), *each(rows * (NUMBER + FLAG), when="x>1")),
            keeps_input=Condition("x", "=", 1),
            scratch=((*edge, *gradient),),
            rerun=(*edge, *gradient),
            gradient=gradient,
        )

    def attention_activations(self, form: Format) -> DescribedActivations:
        """Return what attention keeps, without the scores of pairs of tokens."""
        shape, rows = self.shape, self.shape.seq_len
        hidden, queries = shape.hidden, shape.query_size
        mixed, joined = (
            each(rows * n * form.element_bytes, "x") for n in (queries, shape.qkv_size)
        )
        spread = each(rows * shape.num_heads * FLOAT, "x")  # of the softmax
        weight = self.weight_gradient(hidden * queries, form)  # of the layer behind, made before
        block = self.residual(
            (*joined, *self._copied_heads(form), *mixed, *spread),
            form,
            weights=(hidden * shape.qkv_size, hidden * queries),
            moments=((*mixed, *joined), (*mixed, *weight)),
            widest=joined,
        )
        return replace(block, held=((*joined, *spread * 2), (*weight, *spread * 2)))

    def _copied_heads(self, form: Format) -> Amount:
        """Return heads that are kept beside those that the first layer made."""
        shape, groups = self.shape, self.shape.num_kv_heads
        row_bytes = shape.seq_len * form.element_bytes
        if shape.positions == "rotary":
            return each(row_bytes * (shape.query_size + groups * shape.head_size), "x")
        if shape.num_heads == groups:
            return ()
        # Queries are views too, unless several groups of several lie apart.
        return each(row_bytes * shape.query_size, "x", when=f"x<{groups}")

    def mlp_activations(self, form: Format) -> DescribedActivations:
        """Return what the MLP keeps: both sides of its GELU."""
        wide = each(self.shape.seq_len * self.shape.mlp_hidden * form.element_bytes, "x")
        weight = self.shape.hidden * self.shape.mlp_hidden
        return self.residual(
            (*wide, *wide),
            form,
            weights=(weight, weight),
            moments=((*wide, *self.weight_gradient(weight, form)),),
            widest=wide,
        )

    def head_activations(self, form: Format) -> DescribedActivations:
        """Return what head and loss keep."""
        rows, vocab_size = self.shape.seq_len, self.shape.vocab_size
        logs = each(rows * vocab_size * FLOAT, "x")
        ends = (
            *each(rows * NUMBER, when="x=1"),
            *fixed(FLOAT, when="x=1"),
            *each(rows * (NUMBER + 2 * FLAG), when="x>1"),
            *fixed(NUMBER, when="x>1"),
        )
        weight = self.shape.hidden * vocab_size
        block = self.residual((*logs, *ends), form, weights=(weight,), moments=(), widest=logs)
        return replace(
            block,
            output=each(rows * vocab_size * form.element_bytes, "x"),
            # Gradients of the loss and of the logits; later, with the former gone, of the weight.
            scratch=(
                (*logs, *logs),
                (*self.edge(form), *self.weight_gradient(weight, form)),
            ),
        )

    def weight_gradient(self, elements: int, form: Format) -> Amount:
        """Return the gradient of a weight of so many elements."""
        return fixed(elements * form.element_bytes, "x y")

    def residual(
        self,
        inside: Amount,
        form: Format,
        *,
        weights: tuple[int, ...],
        moments: tuple[Amount, ...],
        widest: Amount,
    ) -> DescribedActivations:
        """Return a block that begins with a norm, with outputs like its inputs.

        `moments` are gradients that are there at different times of its backward.
        """
        edge = self.edge(form)
        copies = fixed(sum(weights) * HALF * form.is_autocast, when="x=1 y=1 z=1")
        rounded = each(self.shape.seq_len * self.shape.hidden * HALF * form.is_autocast, "y")
        # Of weights in pieces along z, gradients are sent off one by one.
        made = fixed(sum(weights) * form.weight_bytes, "x y", when="z=1")
        return DescribedActivations(
            input=edge,
            output=edge,
            kept=(*self.norm(form), *inside, *copies),
            scratch=tuple((*edge, *rounded, *moment) for moment in moments),
            rerun=(*made, *widest, *edge * 3),
            gradient=made,
            keeps_input=Condition("y", "=", 1),
        )
