"""Training data: corpora, tokenizers, data sets, and batches that depend on seed and step alone.

What needs torch is loaded on first use, so the sampler and the token cache work without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.execute.data.corpus import find_files, read_documents
from ganglion.execute.data.idx import find_idx_folder, read_idx
from ganglion.execute.data.sampler import (
    Sampler,
    mix_seed,
    permute,
    permute_array,
    share_index,
    split_indices,
)
from ganglion.execute.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from ganglion.execute.data.tokens import TokenFile, prepare_tokens
from ganglion.lazy import lazy_names

if TYPE_CHECKING:
    from ganglion.execute.data.batches import Batches, read_batch
    from ganglion.execute.data.datasets import (
        GeneratedImages,
        IdxImages,
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
    "BpeTokenizer",
    "ByteTokenizer",
    "DataSource",
    "GeneratedImages",
    "IdxImages",
    "MapDataset",
    "Sampler",
    "Subset",
    "SyntheticTokens",
    "TokenFile",
    "TokenWindows",
    "Tokenizer",
    "find_files",
    "find_idx_folder",
    "load_tokenizer",
    "mix_seed",
    "open_dataset",
    "open_images",
    "open_synthetic",
    "open_text",
    "permute",
    "permute_array",
    "prepare_tokens",
    "read_batch",
    "read_documents",
    "read_idx",
    "save_tokenizer",
    "share_index",
    "split_indices",
]

_NEEDS_TORCH = {
    "Batches": "batches",
    "DataSource": "source",
    "GeneratedImages": "datasets",
    "IdxImages": "datasets",
    "MapDataset": "datasets",
    "Subset": "datasets",
    "SyntheticTokens": "datasets",
    "TokenWindows": "datasets",
    "open_dataset": "source",
    "open_images": "source",
    "open_synthetic": "source",
    "open_text": "source",
    "read_batch": "batches",
}

__getattr__ = lazy_names(__name__, _NEEDS_TORCH)
