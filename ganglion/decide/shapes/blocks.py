"""What a block costs: flop of its matrix products, parameters, and the size of what it passes on.

Of a layer O = I W the products are O = I W forward, dI = dO W^T for the block before and
dW = I^T dO for the weights: equally many flop each. A product of two activations, as in attention,
has two gradients that both go to the block before. The first block's input needs no gradient.

    flop of         forward     backward: input     backward: weight
    linear layer      f             f                   f
    attention         f            2 f                  0

Norms, activations and lookups are not counted: they are lower in order (2104.04473, appendix).
The keywords are the fields of the model shapes, so `gpt_blocks(**asdict(shape), ...)` fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

CONV_CHANNELS = (6, 16)
CONV_WIDTHS = (120, 84)
_KERNEL = 5 * 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block and one microbatch.

    `tied_parameters` is how many of the parameters are the first block's own, held here too: a
    stage that has both blocks has them once.
    """

    forward_flops: float
    input_flops: float
    weight_flops: float
    num_parameters: int
    output_elements: int
    tied_parameters: int = 0

    @property
    def total_flops(self) -> float:
        """Flop of forward and backward."""
        return self.forward_flops + self.input_flops + self.weight_flops


def gpt_blocks(
    *,
    vocab_size: int,
    seq_len: int,
    num_layers: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    mlp_hidden: int,
    microbatch_size: int,
    positions: str = "rotary",
    tied_embedding: bool = False,
    bias: bool = False,
) -> list[BlockCost]:
    """Return embedding, attention and MLP of every layer, and head.

    Attention counts all pairs of tokens, as 2104.04473 does, though a causal kernel may skip half.
    """
    rows = microbatch_size * seq_len
    norm = hidden * (1 + bias)
    queries = num_heads * head_size
    qkv = queries + 2 * num_kv_heads * head_size
    embedding = hidden * (vocab_size + (seq_len if positions == "learned" else 0))
    attention = _linear(
        rows,
        weights=hidden * (qkv + queries),
        others=norm + bias * (qkv + hidden),
        outputs=hidden,
        activation_flops=4 * rows * seq_len * queries,
    )
    mlp = _linear(
        rows,
        weights=2 * hidden * mlp_hidden,
        others=norm + bias * (mlp_hidden + hidden),
        outputs=hidden,
    )
    head = _linear(
        rows,
        weights=hidden * vocab_size,
        others=norm,
        outputs=vocab_size,
        tied=hidden * vocab_size if tied_embedding else 0,
    )
    return [_lookup(rows, embedding, hidden), *[attention, mlp] * num_layers, head]


def mlp_blocks(
    *,
    num_inputs: int,
    num_outputs: int,
    num_layers: int,
    hidden: int,
    microbatch_size: int,
    bias: bool = True,
) -> list[BlockCost]:
    """Return one block for each linear layer."""
    widths = [num_inputs, *[hidden] * (num_layers - 1), num_outputs]
    return _dense(widths, microbatch_size, bias=bias, is_first=True)


def conv_blocks(
    *, image_size: int, num_channels: int, num_outputs: int, microbatch_size: int
) -> list[BlockCost]:
    """Return the two convolutions, each with its pooling, and the three linear layers."""
    half = image_size // 2
    inner = half - 4
    quarter = inner // 2
    first, second = CONV_CHANNELS
    widths = [second * quarter**2, *CONV_WIDTHS, num_outputs]
    return [
        _conv(microbatch_size, num_channels, first, image_size, half, is_first=True),
        _conv(microbatch_size, first, second, inner, quarter, is_first=False),
        *_dense(widths, microbatch_size, bias=True, is_first=False),
    ]


def _linear(
    rows: int,
    *,
    weights: int,
    others: int,
    outputs: int,
    activation_flops: int = 0,
    tied: int = 0,
    is_first: bool = False,
) -> BlockCost:
    """Return a block whose every row meets `weights` numbers in matrices and `others` outside."""
    products = 2 * rows * weights
    return BlockCost(
        forward_flops=products + activation_flops,
        input_flops=0 if is_first else products + 2 * activation_flops,
        weight_flops=products,
        num_parameters=weights + others,
        output_elements=rows * outputs,
        tied_parameters=tied,
    )


def _lookup(rows: int, num_parameters: int, hidden: int) -> BlockCost:
    return BlockCost(
        forward_flops=0,
        input_flops=0,
        weight_flops=0,
        num_parameters=num_parameters,
        output_elements=rows * hidden,
    )


def _dense(
    widths: list[int], microbatch_size: int, *, bias: bool, is_first: bool
) -> list[BlockCost]:
    return [
        _linear(
            microbatch_size,
            weights=inputs * outputs,
            others=bias * outputs,
            outputs=outputs,
            is_first=is_first and index == 0,
        )
        for index, (inputs, outputs) in enumerate(pairwise(widths))
    ]


def _conv(
    microbatch_size: int, inputs: int, outputs: int, size: int, pooled: int, *, is_first: bool
) -> BlockCost:
    """Return a 5x5 convolution with outputs of size x size, pooled afterwards."""
    products = 2 * microbatch_size * size**2 * inputs * outputs * _KERNEL
    return BlockCost(
        forward_flops=products,
        input_flops=0 if is_first else products,
        weight_flops=products,
        num_parameters=outputs * (inputs * _KERNEL + 1),
        output_elements=microbatch_size * outputs * pooled**2,
    )
