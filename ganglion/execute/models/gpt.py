"""GPT: a pre-norm decoder whose blocks are the embedding, the halves of each layer and the head.

In attention one linear layer makes queries, keys and values. Its outputs lie group by group, one
key head with the query heads it serves (here 2), so any equal cut between groups is a whole number
of heads and needs no reordering:

    | q0 q1 k0 v0 | q2 q3 k1 v1 | ...        each letter: head_size numbers
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.shapes import GPTShape
from ganglion.errors import LayoutError
from ganglion.execute.models.blocks import BlockModel, named_parameters
from ganglion.execute.models.initial import Constant, Initial, Normal, drawn_seed

INIT_STD = 0.02
ROTARY_BASE = 10000.0


def check_length(num_tokens: int, seq_len: int) -> None:
    """Refuse a sequence longer than the positions a model was built with."""
    if num_tokens > seq_len:
        raise LayoutError(
            f"a sequence of {num_tokens} tokens does not fit data.seq_len = {seq_len}: the model "
            f"has no positions past it; raise data.seq_len or pass shorter sequences"
        )


class Rotary:
    """Rotary position code (RoFormer, 2104.09864): pair i of position p turns by p * base^(-2i/d).

    The table is a cache, not a buffer: it is not saved, not sent to other ranks, and not rounded
    when a model is cast to bf16.
    """

    def __init__(self, head_size: int, seq_len: int) -> None:
        self.head_size = head_size
        self.seq_len = seq_len
        self._table: Tensor | None = None

    def table(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the turns of the first positions: complex64 of (num_tokens, 1, 1, pairs)."""
        check_length(num_tokens, self.seq_len)
        if self._table is None or self._table.device != device:
            self._table = self._make_table(device)
        return self._table[:num_tokens]

    def rotate(self, heads: Tensor) -> Tensor:
        """Turn (batch, tokens, groups, heads, head_size); at least fp32 inside, same dtype out."""
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        pairs = torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2))
        turned = pairs * self.table(heads.shape[1], heads.device)
        return torch.view_as_real(turned).flatten(-2).to(heads.dtype)

    def _make_table(self, device: torch.device) -> Tensor:
        # fp64 keeps far positions exact. A table made in inference mode could not be saved for
        # backward.
        with torch.inference_mode(False), torch.no_grad():
            pair = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu")
            position = torch.arange(self.seq_len, dtype=torch.float64, device="cpu")
            angle = position[:, None] * ROTARY_BASE ** (-pair / self.head_size)
            turns = torch.polar(torch.ones_like(angle), angle).to(device, torch.complex64)
            return turns[:, None, None]


class Attention(nn.Module):
    """Block: x + out(attention(norm(x))); (batch, tokens, hidden) in and out.

    The number of heads is read from the width of `qkv`, so a layer that holds only some of the
    groups works unchanged.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.heads_per_group = shape.num_heads // shape.num_kv_heads
        qkv_size = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.qkv = nn.Linear(shape.hidden, qkv_size, bias=shape.bias)
        self.out = nn.Linear(shape.num_heads * shape.head_size, shape.hidden, bias=shape.bias)
        uses_rotary = shape.positions == "rotary"
        self.rotary = Rotary(shape.head_size, shape.seq_len) if uses_rotary else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus causal attention."""
        batch, tokens, _ = x.shape
        qkv: Tensor = self.qkv(self.norm(x))
        groups = qkv.view(batch, tokens, -1, self.heads_per_group + 2, self.head_size)
        queries, keys, values = groups.split_with_sizes((self.heads_per_group, 1, 1), dim=3)
        if self.rotary is not None:
            queries, keys = self.rotary.rotate(queries), self.rotary.rotate(keys)
        mixed = F.scaled_dot_product_attention(
            queries.flatten(2, 3).transpose(1, 2),
            keys.flatten(2, 3).transpose(1, 2),
            values.flatten(2, 3).transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads_per_group > 1,
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + projected


class Embedding(nn.Module):
    """Block: token ids (batch, tokens) to vectors (batch, tokens, hidden)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.seq_len = shape.seq_len
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        learned = shape.positions == "learned"
        self.positions = nn.Embedding(shape.seq_len, shape.hidden) if learned else None

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the tokens and, if positions are learned, add theirs."""
        check_length(ids.shape[1], self.seq_len)
        vectors: Tensor = self.tokens(ids)
        if self.positions is None:
            return vectors
        places: Tensor = self.positions(torch.arange(ids.shape[1], device=ids.device))
        return vectors + places


class FeedForward(nn.Module):
    """Block: x + down(gelu(up(norm(x))))."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.up = nn.Linear(shape.hidden, shape.mlp_hidden, bias=shape.bias)
        self.down = nn.Linear(shape.mlp_hidden, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token on its own."""
        change: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + change


class Layer(nn.Module):
    """The two blocks of a layer, held here so that their names nest."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.mlp = FeedForward(shape)


class Head(nn.Module):
    """Block: vectors to logits (batch, tokens, vocab_size); as in GPT-2 it never has a bias."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.linear = nn.Linear(shape.hidden, shape.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score every token of the vocabulary at every position."""
        logits: Tensor = self.linear(self.norm(x))
        return logits


class GPT(BlockModel):
    """A decoder-only transformer: int64 ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        seed = drawn_seed()  # the first draw: torch's layers draw too
        self.shape = shape
        self.embedding = Embedding(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.head = Head(shape)
        if shape.tied_embedding:
            self.head.linear.weight = self.embedding.tokens.weight
        self.initialize(seed)

    def blocks(self) -> dict[str, nn.Module]:
        """Return embedding, then attention and MLP of each layer, then head."""
        named: dict[str, nn.Module] = {"embedding": self.embedding}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            named[f"layers.{index}.attention"] = layer.attention
            named[f"layers.{index}.mlp"] = layer.mlp
        named["head"] = self.head
        return named

    def initial_values(self) -> dict[str, Initial]:
        """Return GPT-2's initial values: the sum of residual additions does not grow with depth."""
        residual = Normal(INIT_STD / math.sqrt(2 * self.shape.num_layers))
        values: dict[str, Initial] = {}
        for name in named_parameters(self.blocks()):
            if name.endswith(".bias"):
                values[name] = Constant(0.0)
            elif name.endswith(".norm.weight"):
                values[name] = Constant(1.0)
            else:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                values[name] = residual if adds else Normal(INIT_STD)
        return values
