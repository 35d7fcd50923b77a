"""Training data: corpora, tokenizers, data sets, and batches that depend on seed and step alone.

Modules that need torch are loaded on first use: the sampler and the token cache work without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.execute.data.idx import find_idx_folder
from ganglion.execute.data.sampler import (
    Sampler,
    mix_seed,
    permute,
    share_index,
)
from ganglion.execute.data.tokenizers import (
    load_tokenizer,
    save_tokenizer,
)
from ganglion.execute.data.tokens import prepare_tokens
from ganglion.lazy import lazy_names

if TYPE_CHECKING:
    from ganglion.execute.data.batches import Batches, read_batch
    from ganglion.execute.data.datasets import (
        GeneratedImages,
        MapDataset,
        Subset,
        SyntheticTokens,
        TokenWindows,
    )
    from ganglion.execute.data.source import (
        DataSource,
        open_dataset,
        open_images,
        open_synthetic,
        open_text,
    )

__all__ = [
    "Batches",
    "DataSource",
    "GeneratedImages",
    "MapDataset",
    "Sampler",
    "Subset",
    "SyntheticTokens",
    "TokenWindows",
    "find_idx_folder",
    "load_tokenizer",
    "mix_seed",
    "open_dataset",
    "open_images",
    "open_synthetic",
    "open_text",
    "permute",
    "prepare_tokens",
    "read_batch",
    "save_tokenizer",
    "share_index",
]

_NEEDS_TORCH = {
    "batches": ("Batches", "read_batch"),
    "datasets": ("GeneratedImages", "MapDataset", "Subset", "SyntheticTokens", "TokenWindows"),
    "source": ("DataSource", "open_dataset", "open_images", "open_synthetic", "open_text"),
}

__getattr__ = lazy_names(
    __name__, {name: module for module, names in _NEEDS_TORCH.items() for name in names}
)
