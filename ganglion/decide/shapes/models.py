"""Model shapes: what a model is, in numbers, before any tensor exists.

The models are built from these records, and the checks of `resolve()` and the cost models read
them, so a layout can be refused without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """Linear layers with GELU between them, on flattened inputs; one block a layer."""

    num_inputs: int
    num_outputs: int
    num_layers: int
    hidden: int
    bias: bool = True

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can cut between."""
        return self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """A LeNet-style network: two convolutions with pooling, then three linear layers."""

    image_size: int
    num_channels: int
    num_outputs: int

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can cut between."""
        return 5


ModelShape = GPTShape | MLPShape | ConvShape
