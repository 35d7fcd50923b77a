"""GPT: a pre-norm decoder whose blocks are the embedding, the halves of each layer and the head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.shapes import GPTShape
from ganglion.execute.models.attention import Attention, check_length
from ganglion.execute.models.blocks import BlockModel, named_parameters
from ganglion.execute.models.initial import Constant, Initial, Normal, drawn_seed

INIT_STD = 0.02


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
    """The two blocks of a layer; it only holds them, so that their names nest."""

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
        """Draw weights as GPT-2 does: the sum of all residual additions keeps a depth-free size."""
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
