"""How the layers of Hugging Face's GPT-2 and Llama are split over x and y.

Features go y -> x -> y inside a block, as in our own models. Attention splits its heads over x, so
whole heads must be dealt: the features of a layer may divide where its heads do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
from ganglion.execute.models.cut_table import CutTable, HeadCuts, cuts_by_table
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

_NORM, _RMS_NORM, _DROPOUT = NormCut("y"), NormCut("y", RMS), DropoutCut("y")
_CUTS: CutTable = MappingProxyType(
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


def cuts_of(blocks: Mapping[str, nn.Module]) -> ModelCuts | None:
    """Return the cuts of blocks that `hugging_face_blocks` made; None if there are others."""
    heads: HeadCuts = {GPT2Attention: _gpt2_heads, LlamaAttention: _llama_heads}
    return cuts_by_table(blocks, _CUTS, heads, (GPT2Head, LlamaHead))


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
    """Say why heads cannot be dealt: the kernel draws one mask for all of them, out of reach."""
    if dropout == 0:
        return ""
    return (
        f"{key} = {dropout} draws one mask for the heads of all ranks, so the result would depend "
        f"on the layout: set {key} = 0 in model.args"
    )
