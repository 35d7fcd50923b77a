"""Llama and BERT, as changes to the blocks of a GPT.

Autograd saves these tensors of Llama's blocks in the code of Hugging Face's transformers:

    attention   input  normed  scaled 1/rms | queries keys values  cos sin  sums  mixed
    MLP         input  normed  scaled 1/rms | gate  silu(gate)  up  their product
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ganglion.decide.shapes.amounts import FORMATS, Amount, Condition, Format, each, fixed
from ganglion.decide.shapes.block import (
    FLOAT,
    HALF,
    TABLE,
    Parameter,
    linear_parameters,
    vector,
)
from ganglion.decide.shapes.described import (
    DescribedActivations,
    DescribedBlock,
    DescribedModel,
    layers_of_all,
    linear_flops,
)
from ganglion.decide.shapes.gpt import GPTBlocks, GPTShape, describe_transformer

_NUM_SEGMENTS = 2  # of BERT


def describe_llama(shape: GPTShape) -> DescribedModel:
    """Return a Llama: RMS norms, rotary positions, a gated MLP, no biases."""
    return describe_transformer("llama", shape, _LlamaBlocks(shape))


def describe_bert(shape: GPTShape) -> DescribedModel:
    """Return a BERT for masked tokens: a GPT's layers, segments, and a transform in the head.

    Norms come before the layers, as in Megatron-LM; the original has as many behind them.
    """
    return describe_transformer("bert", shape, _BertBlocks(shape))


@dataclass(frozen=True, slots=True)
class _LlamaBlocks(GPTBlocks):
    def attention(self) -> DescribedBlock:
        shape = self.shape
        hidden, inner = shape.hidden, shape.query_size
        keys = shape.num_kv_heads * shape.head_size
        return self.block(
            "attention",
            (
                *linear_parameters(hidden, inner, ("y", "x"), bias=False),
                *linear_parameters(hidden, keys, ("y", "x"), bias=False) * 2,
                *linear_parameters(inner, hidden, ("x", "y"), bias=False),
            ),
            weights=hidden * (shape.qkv_size + inner),
            mixing=4 * shape.seq_len**2 * inner,
            activations=tuple(map(self.attention_activations, FORMATS)),
        )

    def mlp(self) -> DescribedBlock:
        hidden, inner = self.shape.hidden, self.shape.mlp_hidden
        return self.block(
            "mlp",
            (
                *linear_parameters(hidden, inner, ("y", "x"), bias=False) * 2,
                *linear_parameters(inner, hidden, ("x", "y"), bias=False),
            ),
            weights=3 * hidden * inner,
            activations=tuple(map(self.mlp_activations, FORMATS)),
        )

    def norm(self, form: Format) -> Amount:
        """Return an RMS norm: scaled in fp32, then times its weight; its input in fp32 too."""
        rows, width = self.shape.seq_len, self.shape.seq_len * self.shape.hidden
        wide = FLOAT * (form.weight_bytes == HALF)
        return (
            *each(width * (wide + form.weight_bytes + form.element_bytes), "y"),
            *each(rows * FLOAT),
        )

    def _more_casts(self, form: Format, count: int) -> Amount:
        """Return the results of a norm for further layers: autocast makes a copy for each."""
        width = self.shape.seq_len * self.shape.hidden
        return each(count * width * HALF * form.is_autocast, "y")

    def attention_activations(self, form: Format) -> DescribedActivations:
        shape, rows = self.shape, self.shape.seq_len
        hidden, queries = shape.hidden, shape.query_size
        mixed, joined = (
            each(rows * n * form.element_bytes, "x") for n in (queries, shape.qkv_size)
        )
        spread = each(rows * shape.num_heads * FLOAT, "x")
        turns = fixed(2 * rows * shape.head_size * form.weight_bytes)
        weight = self.weight_gradient(hidden * queries, form)
        return self.residual(
            (*self._more_casts(form, 2), *joined, *mixed, *spread, *turns),
            form,
            weights=(hidden * shape.qkv_size, hidden * queries),
            moments=((*mixed, *joined), (*mixed, *weight)),
            widest=joined,
        )

    def mlp_activations(self, form: Format) -> DescribedActivations:
        wide = each(self.shape.seq_len * self.shape.mlp_hidden * form.element_bytes, "x")
        weight = self.shape.hidden * self.shape.mlp_hidden
        return self.residual(
            (*self._more_casts(form, 1), *wide * 4),
            form,
            weights=(weight,) * 3,
            moments=((*wide * 3,), (*wide * 2, *self.weight_gradient(weight, form))),
            widest=(*wide * 2,),
        )

    def residual(
        self,
        inside: Amount,
        form: Format,
        *,
        weights: tuple[int, ...],
        moments: tuple[Amount, ...],
        widest: Amount,
    ) -> DescribedActivations:
        """Return the same as a GPT, but that a norm in fp32 keeps a copy of an input in half."""
        # super() without arguments does not work in a dataclass with slots.
        block = GPTBlocks.residual(
            self, inside, form, weights=weights, moments=moments, widest=widest
        )
        is_copied = form.weight_bytes == HALF
        return replace(block, keeps_input=False if is_copied else Condition("y", "=", 1))


@dataclass(frozen=True, slots=True)
class _BertBlocks(GPTBlocks):
    def embedding(self) -> DescribedBlock:
        block, hidden = GPTBlocks.embedding(self), self.shape.hidden
        rows = self.shape.seq_len
        segments = Parameter(shape=(_NUM_SEGMENTS, hidden), axes=(None, "y"), role=TABLE)
        parameters = (*block.parameters, segments, *vector(hidden, "y") * 2)
        return replace(block, parameters=parameters, layers=layers_of_all(parameters, (rows, rows)))

    def embedding_activations(self, form: Format) -> DescribedActivations:
        """Return the same as a GPT with the sum that its norm keeps."""
        block = GPTBlocks.embedding_activations(self, form)
        stats = each(2 * self.shape.seq_len * FLOAT)
        return replace(block, kept=(*block.kept, *self.edge(form), *stats))

    def head(self) -> DescribedBlock:
        shape, rows = self.shape, self.shape.seq_len
        block, transform = GPTBlocks.head(self), shape.hidden**2
        parameters = (
            *linear_parameters(shape.hidden, shape.hidden, ("y", "x"), bias=True),
            *block.parameters,
            *vector(shape.vocab_size, "x"),
        )
        return replace(
            block,
            flops=linear_flops(rows, transform + shape.hidden * shape.vocab_size),
            parameters=parameters,
            layers=layers_of_all(parameters, (rows, rows)),
        )

    def head_activations(self, form: Format) -> DescribedActivations:
        """Return the same as a GPT with both sides of the transform's GELU."""
        block = GPTBlocks.head_activations(self, form)
        side = each(self.shape.seq_len * self.shape.hidden * form.element_bytes, "x")
        copies = fixed(self.shape.hidden**2 * HALF * form.is_autocast, when="x=1 y=1 z=1")
        return replace(block, kept=(*block.kept, *side * 2, *copies))
