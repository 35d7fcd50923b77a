"""What the blocks of the built-in models keep of one microbatch for its backward, in bytes.

These are the tensors that autograd saves in our own blocks, each piece of memory once:

    attention   input  mean 1/std | norm  queries keys  qkv (values)  sums  mixed
    MLP         input  mean 1/std | norm  up  gelu
    head        input  mean 1/std | norm  log-softmax  targets

Values are a view, so all of qkv lives as long as they do. A norm over split features keeps its
result in the place of its input. In bf16 (autocast) the stream between blocks, norms and softmax
stay fp32, and torch's own layers keep a bf16 copy of each weight; split ones make it anew. With
weights in half (masters) everything but softmax is in half too, and nothing is copied.

`tests/single/test_memory_model.py` compares every number with what autograd really saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.shapes.blocks import CONV_CHANNELS, CONV_WIDTHS
from ganglion.decide.shapes.parameters import KERNEL_SIZE, chain_axes
from ganglion.decide.topology import Mesh

FLOAT, HALF, NUMBER, FLAG = 4, 2, 8, 1  # bytes of fp32, bf16, int64 and bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """One block and one microbatch on one rank.

    `kept_bytes` leave out the block's input and output, for its neighbours may keep the same
    memory. `scratch_bytes` come and go while the block runs backward, above what is kept:
    gradients of activations and of one weight. A block that was recomputed makes the gradients of
    all its weights at once: `held_bytes` of them are there beside the scratch already, all
    `gradient_bytes` are among the `rerun_bytes` when what it kept is gone. These are estimates.
    """

    input_bytes: int
    output_bytes: int
    kept_bytes: int
    scratch_bytes: int = 0
    held_bytes: int = 0
    rerun_bytes: int = 0
    gradient_bytes: int = 0
    keeps_input: bool = True
    keeps_output: bool = False

    @property
    def saved_bytes(self) -> int:
        """All that autograd saves for the block's backward."""
        ends = self.keeps_input * self.input_bytes + self.keeps_output * self.output_bytes
        return self.kept_bytes + ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the blocks of a rank compute: split over what, and in which precision."""

    microbatch_size: int
    mesh: Mesh
    precision: str = "fp32"

    @property
    def element_bytes(self) -> int:
        """Bytes of what a product gives."""
        return FLOAT if self.precision == "fp32" else HALF

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, of its gradient, and of what is passed between blocks."""
        return HALF if self.precision.endswith("_master") else FLOAT

    @property
    def copies_weights(self) -> bool:
        """Whether a weight is kept in bf16 for the backward of every microbatch."""
        return self.precision == "bf16" and self.mesh.x * self.mesh.y * self.mesh.z == 1

    def share(self, size: int, axis: str | None) -> int:
        """Return this rank's part of features that an axis splits."""
        return size if axis is None else size // self.mesh.size(axis)


def gpt_activations(
    layout: Layout,
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
) -> list[BlockActivations]:
    """Return those of the embedding, of attention and MLP of every layer, and of the head."""
    block = _TransformerBlock(layout, seq_len, hidden)
    attention = block.attention(num_heads, num_kv_heads, head_size, positions == "rotary")
    return [
        block.embedding(vocab_size, has_places=positions == "learned"),
        *[attention, block.mlp(mlp_hidden)] * num_layers,
        block.head(vocab_size),
    ]


def mlp_activations(
    layout: Layout,
    *,
    num_inputs: int,
    num_outputs: int,
    num_layers: int,
    hidden: int,
    bias: bool = True,
) -> list[BlockActivations]:
    """Return those of each linear layer."""
    widths = [num_inputs, *[hidden] * (num_layers - 1), num_outputs]
    if num_layers == 1:
        return [_whole_layer(layout, num_inputs, num_outputs)]
    chain = _Chain(layout, last=num_layers - 1)
    layers = enumerate(zip(pairwise(widths), chain_axes(num_layers), strict=True))
    return [chain.dense(number, *sizes, axes) for number, (sizes, axes) in layers]


def conv_activations(
    layout: Layout, *, image_size: int, num_channels: int, num_outputs: int
) -> list[BlockActivations]:
    """Return those of the two convolutions and of the three linear layers."""
    half = image_size // 2
    inner = half - 4
    chain, axes = _Chain(layout, last=4), chain_axes(5)
    first, second = CONV_CHANNELS
    widths = (second * (inner // 2) ** 2, *CONV_WIDTHS, num_outputs)
    layers = zip(pairwise(widths), axes[2:], strict=True)
    return [
        chain.conv(0, num_channels, first, (image_size, image_size, half), axes[0]),
        chain.conv(1, first, second, (half, inner, inner // 2), axes[1]),
        *(
            chain.dense(number, *sizes, sides, keeps_result=True)
            for number, (sizes, sides) in enumerate(layers, start=2)
        ),
    ]


@dataclass(frozen=True, slots=True)
class _TransformerBlock:
    """The blocks of a GPT; features between them are split over y, inside over x."""

    layout: Layout
    seq_len: int
    hidden: int

    @property
    def _rows(self) -> int:
        return self.layout.microbatch_size * self.seq_len

    @property
    def _edge_bytes(self) -> int:
        return self._rows * self.layout.share(self.hidden, "y") * self.layout.weight_bytes

    @property
    def _norm_bytes(self) -> int:
        """The result of a norm for the layer behind it, and what its own backward needs."""
        rows, width = self._rows, self.layout.share(self.hidden, "y")
        result = rows * width * self.layout.element_bytes
        if self.layout.mesh.y == 1:
            return result + 2 * rows * self.layout.weight_bytes
        return result + rows * width * FLOAT + rows * FLOAT

    def embedding(self, vocab_size: int, *, has_places: bool) -> BlockActivations:
        rows, is_split = self._rows, self.layout.mesh.x > 1
        places = self.seq_len * NUMBER * has_places
        table = self.layout.share(vocab_size, "x") * self.layout.share(self.hidden, "y")
        return BlockActivations(
            input_bytes=rows * NUMBER,
            output_bytes=self._edge_bytes,
            kept_bytes=places + (rows * (NUMBER + FLAG) if is_split else 0),
            keeps_input=not is_split,
            scratch_bytes=self._edge_bytes + table * self.layout.weight_bytes,
            rerun_bytes=self._edge_bytes + table * self.layout.weight_bytes,
            gradient_bytes=table * self.layout.weight_bytes,
        )

    def attention(
        self, num_heads: int, num_kv_heads: int, head_size: int, is_rotary: bool
    ) -> BlockActivations:
        layout, rows = self.layout, self._rows
        heads, groups = layout.share(num_heads, "x"), layout.share(num_kv_heads, "x")
        queries, qkv = heads * head_size, (heads + 2 * groups) * head_size
        # Without turning, queries are views too, unless several groups of several lie apart.
        is_copied = heads > groups > 1
        copied = (queries + groups * head_size) if is_rotary else queries * is_copied
        inside = rows * (qkv + copied + queries) * layout.element_bytes + rows * heads * FLOAT
        mixed, joined = (rows * width * layout.element_bytes for width in (queries, qkv))
        weight = self._weight_bytes(self.hidden * queries)  # of the layer behind, made before
        block = self._residual(
            inside,
            weights=(self.hidden * qkv, self.hidden * queries),
            gradients=mixed + max(joined, weight),
            widest=joined,
        )
        return replace(block, held_bytes=min(joined, weight) + 2 * rows * heads * FLOAT)

    def mlp(self, mlp_hidden: int) -> BlockActivations:
        width = self.layout.share(mlp_hidden, "x")
        wide = self._rows * width * self.layout.element_bytes
        weight = self.hidden * width
        return self._residual(
            2 * wide,
            weights=(weight, weight),
            gradients=wide + self._weight_bytes(weight),
            widest=wide,
        )

    def head(self, vocab_size: int) -> BlockActivations:
        layout, rows = self.layout, self._rows
        share = layout.share(vocab_size, "x")
        logs = rows * share * FLOAT
        ends = rows * NUMBER + FLOAT if layout.mesh.x == 1 else rows * (NUMBER + 2 * FLAG) + NUMBER
        weight = self.hidden * share
        block = self._residual(logs + ends, weights=(weight,), gradients=0, widest=logs)
        return replace(
            block,
            output_bytes=rows * share * layout.element_bytes,
            # Those of the loss and of the logits; later, with the former gone, of the weight.
            scratch_bytes=max(2 * logs, self._edge_bytes + self._weight_bytes(weight)),
        )

    def _weight_bytes(self, elements: int) -> int:
        """Return the bytes of the gradient of a weight of which x has its share already."""
        return elements // self.layout.mesh.y * self.layout.element_bytes

    def _residual(
        self, inside_bytes: int, *, weights: tuple[int, ...], gradients: int, widest: int
    ) -> BlockActivations:
        """Return a block that begins with a norm and gives what it takes."""
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


@dataclass(frozen=True, slots=True)
class _Chain:
    """Layers one after another; block `last` has the loss behind it."""

    layout: Layout
    last: int

    def dense(
        self,
        number: int,
        inputs: int,
        outputs: int,
        axes: tuple[str | None, str | None],
        *,
        keeps_result: bool = False,
    ) -> BlockActivations:
        """A linear layer, with GELU, or with a ReLU that keeps its result instead of its input."""
        layout, rows = self.layout, self.layout.microbatch_size
        taken, given = layout.share(inputs, axes[0]), layout.share(outputs, axes[1])
        copy = layout.copies_weights and number > 0  # the gradient of the data is not needed
        kept = inputs * outputs * HALF * copy
        if number == self.last:
            kept += rows * (outputs * FLOAT + NUMBER) + FLOAT
        elif not keeps_result:
            kept += rows * given * layout.element_bytes
        before, after = rows * taken * (number > 0), rows * given
        gradient = taken * given * layout.weight_bytes
        block = self._block(number, rows * taken, after, kept)
        return replace(
            block,
            scratch_bytes=max(
                2 * after * layout.element_bytes, before * layout.element_bytes + gradient
            ),
            rerun_bytes=(before + after) * layout.element_bytes + gradient,
            gradient_bytes=gradient,
            keeps_output=keeps_result and number < self.last,
        )

    def conv(
        self,
        number: int,
        inputs: int,
        outputs: int,
        sizes: tuple[int, int, int],
        axes: tuple[str | None, str | None],
    ) -> BlockActivations:
        """A convolution, ReLU and pooling, which keeps where each maximum was."""
        layout, rows = self.layout, self.layout.microbatch_size
        taken, given = layout.share(inputs, axes[0]), layout.share(outputs, axes[1])
        before, size, pooled = sizes
        weight = inputs * outputs * KERNEL_SIZE**2
        kept = weight * HALF * layout.copies_weights
        kept += rows * given * (size**2 * layout.element_bytes + pooled**2 * NUMBER)
        elements = (rows * taken * before**2, rows * given * pooled**2)
        made = 2 * rows * given * size**2 * layout.element_bytes
        block = self._block(number, *elements, kept)
        return replace(block, scratch_bytes=block.output_bytes + made)

    def _block(self, number: int, taken: int, given: int, kept: int) -> BlockActivations:
        layout = self.layout
        element_bytes = layout.element_bytes
        is_cast = number == 0 and layout.precision == "bf16"  # data come in fp32
        return BlockActivations(
            input_bytes=taken * (layout.weight_bytes if number == 0 else element_bytes),
            output_bytes=given * element_bytes,
            kept_bytes=kept + (taken * element_bytes if is_cast else 0),
            keeps_input=not is_cast,
        )


def _whole_layer(layout: Layout, inputs: int, outputs: int) -> BlockActivations:
    """Return a model of one layer: it cuts whole inputs and gathers whole outputs."""
    rows = layout.microbatch_size
    makes_copy = layout.mesh.y > 1 or layout.precision == "bf16"
    copy = rows * layout.share(inputs, "y") * layout.element_bytes
    return BlockActivations(
        input_bytes=rows * inputs * layout.weight_bytes,
        output_bytes=rows * outputs * layout.element_bytes,
        kept_bytes=rows * (outputs * FLOAT + NUMBER) + FLOAT + copy * makes_copy,
        scratch_bytes=2 * rows * outputs * FLOAT,
        keeps_input=not makes_copy,
    )
