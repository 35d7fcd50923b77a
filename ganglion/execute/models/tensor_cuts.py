"""How the layers of known models are split over x and y.

Inside a block features go y -> x -> y, so blocks fit together in any order. Attention splits its
heads over x, in whole heads: the features of a layer may divide where its heads do not. A model
with an unknown block gets no cuts, and whole activations everywhere: the two cannot be mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from ganglion.decide.topology import (
    NORMAL,
    RMS,
    TRANSPOSED,
    Cut,
    DropoutCut,
    EmbeddingCut,
    LinearCut,
    ModelCuts,
    NormCut,
    WidthCut,
)
from ganglion.execute.models.gpt import Attention, Embedding, FeedForward, Head
from ganglion.execute.models.hugging_face import (
    GPT2Attention,
    GPT2Embedding,
    GPT2FeedForward,
    GPT2Head,
    LlamaAttention,
    LlamaEmbedding,
    LlamaFeedForward,
    LlamaHead,
)
from ganglion.execute.models.small_nets import ConvPool, Dense

CutTable = Mapping[type[nn.Module], Mapping[str, Cut]]
HeadCuts = Mapping[type[nn.Module], Callable[[nn.Module], Mapping[str, Cut]]]

_NORM, _RMS_NORM, _DROPOUT = NormCut("y"), NormCut("y", RMS), DropoutCut("y")
_TRANSFORMER: CutTable = MappingProxyType(
    {
        Embedding: {"tokens": EmbeddingCut("x", "y"), "positions": EmbeddingCut(None, "y")},
        Attention: {"norm": _NORM, "qkv": NORMAL, "out": TRANSPOSED},
        FeedForward: {"norm": _NORM, "up": NORMAL, "down": TRANSPOSED},
        Head: {"norm": _NORM, "linear": NORMAL},
    }
)
_HUGGING_FACE: CutTable = MappingProxyType(
    {
        GPT2Embedding: {
            "wte": EmbeddingCut("x", "y"),
            "wpe": EmbeddingCut(None, "y"),
            "drop": _DROPOUT,
        },
        GPT2Attention: {
            "ln_1": _NORM,
            "attn.c_attn": LinearCut("y", "x", sections=3),
            "attn.c_proj": TRANSPOSED,
            "attn.resid_dropout": _DROPOUT,
        },
        GPT2FeedForward: {
            "ln_2": _NORM,
            "mlp.c_fc": NORMAL,
            "mlp.c_proj": TRANSPOSED,
            "mlp.dropout": _DROPOUT,
        },
        GPT2Head: {"ln_f": _NORM, "lm_head": NORMAL},
        LlamaEmbedding: {"embed_tokens": EmbeddingCut("x", "y")},
        LlamaAttention: {
            "input_layernorm": _RMS_NORM,
            "self_attn.q_proj": NORMAL,
            "self_attn.k_proj": NORMAL,
            "self_attn.v_proj": NORMAL,
            "self_attn.o_proj": TRANSPOSED,
        },
        LlamaFeedForward: {
            "post_attention_layernorm": _RMS_NORM,
            "mlp.gate_proj": NORMAL,
            "mlp.up_proj": NORMAL,
            "mlp.down_proj": TRANSPOSED,
        },
        LlamaHead: {"norm": _RMS_NORM, "lm_head": NORMAL},
    }
)


def tensor_cuts(blocks: Mapping[str, nn.Module]) -> ModelCuts:
    """Return the cuts of a model in blocks; none if a block is unknown."""
    gpt = cuts_by_table(blocks, _TRANSFORMER, {Attention: _heads}, (Head,))
    return gpt or hugging_face_cuts(blocks) or _chain(blocks) or ModelCuts({})


def _heads(block: nn.Module) -> dict[str, Cut]:
    """Split whole groups of heads: features may divide where groups do not."""
    attention = cast(Attention, block)
    num_groups = attention.out.in_features // (attention.heads_per_group * attention.head_size)
    return {"": WidthCut("x", counts=(("model.kv_heads", num_groups),))}


def _chain(blocks: Mapping[str, nn.Module]) -> ModelCuts | None:
    """Return the cuts of a chain of layers, each split along its input's axis."""
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


def cuts_by_table(
    blocks: Mapping[str, nn.Module],
    table: CutTable,
    heads: HeadCuts,
    outputs: tuple[type[nn.Module], ...],
) -> ModelCuts | None:
    """Return the cuts of blocks that are all in `table`, by their children's names; else None.

    `heads` has further cuts of blocks with attention. Blocks return features split over y, those of
    `outputs` over x. Children that a block does not have are left out.
    """
    cuts: dict[str, Cut] = {}
    for name, block in blocks.items():
        if type(block) not in table:
            return None
        present = {child for child, module in block.named_modules() if module is not None}
        found = {child: cut for child, cut in table[type(block)].items() if child in present}
        if type(block) in heads:
            found |= heads[type(block)](block)
        cuts |= {f"{name}.{child}" if child else name: cut for child, cut in found.items()}
    is_output = isinstance([*blocks.values()][-1], outputs)
    return ModelCuts(cuts, "x" if is_output else "y")


def hugging_face_cuts(blocks: Mapping[str, nn.Module]) -> ModelCuts | None:
    """Return the cuts of blocks that `hugging_face_blocks` made; None if there are others."""
    heads: HeadCuts = {GPT2Attention: _gpt2_heads, LlamaAttention: _llama_heads}
    return cuts_by_table(blocks, _HUGGING_FACE, heads, (GPT2Head, LlamaHead))


def _gpt2_heads(block: nn.Module) -> dict[str, Cut]:
    attention: Any = block.attn
    heads = WidthCut(
        "x",
        ("split_size",),  # of queries, of keys, of values; heads are counted by their size
        counts=(("n_head", attention.config.n_head),),
        refusal=_refusal("attn_pdrop", attention.attn_dropout.p),
    )
    return {"attn": heads}


def _llama_heads(block: nn.Module) -> dict[str, Cut]:
    attention: Any = block.self_attn
    config = attention.config
    heads = WidthCut(
        "x",
        counts=(
            ("num_key_value_heads", config.num_key_value_heads),
            ("num_attention_heads", config.num_attention_heads),
        ),
        refusal=_refusal("attention_dropout", attention.attention_dropout),
    )
    return {"self_attn": heads}


def _refusal(key: str, dropout: float) -> str:
    """Return why heads cannot be split: the kernel draws one mask for all of them."""
    if dropout == 0:
        return ""
    return (
        f"{key} = {dropout} draws one mask for the heads of all ranks, so the result would depend "
        f"on the layout: set {key} = 0 in model.args"
    )
