"""A Hugging Face model as a block: ids in, logits out."""

from __future__ import annotations

from torch import Tensor, nn


class Logits(nn.Module):
    """A Hugging Face model that returns nothing but its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids, use_cache=False).logits
        return logits
