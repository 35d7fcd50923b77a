"""The data of a run file's [data] section, split for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ganglion.errors import DataError
from ganglion.execute.data.batches import read_sample
from ganglion.execute.data.datasets import (
    GeneratedImages,
    IdxImages,
    MapDataset,
    Subset,
    SyntheticTokens,
    TokenWindows,
)
from ganglion.execute.data.idx import find_idx_folder, find_idx_pair
from ganglion.execute.data.sampler import split_indices
from ganglion.execute.data.tokenizers import Tokenizer
from ganglion.execute.data.tokens import prepare_tokens

NUM_GENERATED_IMAGES = 10_000
NUM_SYNTHETIC_SAMPLES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Samples to train on, samples held out, and their sizes for a model.

    num_classes: token ids or classes; 0 if unknown.
    input_shape: of one sample's input, without a batch dim.
    tokens_per_sample: the sequence length for tokens, 1 for everything else.
    """

    train: MapDataset
    held_out: MapDataset | None
    num_classes: int
    input_shape: tuple[int, ...]
    tokens_per_sample: int
    tokenizer: Tokenizer | None = None


def open_text(
    source: str,
    tokenizer: str,
    bpe_vocab_size: int,
    seq_len: int,
    val_fraction: float,
    seed: int,
    cache_dir: Path,
) -> DataSource:
    """Open text as windows of `seq_len` tokens; the token file is made on first use."""
    tokens = prepare_tokens(source, tokenizer, bpe_vocab_size, cache_dir)
    train, held_out = _split(TokenWindows(tokens.open(), seq_len), val_fraction, seed)
    return DataSource(
        train=train,
        held_out=held_out,
        num_classes=tokens.vocab_size,
        input_shape=(seq_len,),
        tokens_per_sample=seq_len,
        tokenizer=tokens.tokenizer,
    )


def open_synthetic(seq_len: int, vocab_size: int, val_fraction: float, seed: int) -> DataSource:
    """Open generated tokens that follow a noisy rule, which can be learnt."""
    dataset = SyntheticTokens(NUM_SYNTHETIC_SAMPLES, seq_len, vocab_size, seed)
    train, held_out = _split(dataset, val_fraction, seed)
    return DataSource(
        train=train,
        held_out=held_out,
        num_classes=vocab_size,
        input_shape=(seq_len,),
        tokens_per_sample=seq_len,
    )


def open_images(source: str, val_fraction: float, seed: int) -> DataSource:
    """Open `generated` (or ""), `fashion-mnist`, or a folder of IDX files.

    A folder's own t10k files are the held-out samples, all of them; without such files
    `val_fraction` of the training files is held out.
    """
    if source in ("", "generated"):
        generated = GeneratedImages(NUM_GENERATED_IMAGES, seed=seed)
        train, held_out = _split(generated, val_fraction, seed)
        return _of_samples(train, held_out, generated.num_classes)
    folder = find_idx_folder(source)
    train_pair, held_out_pair = (find_idx_pair(folder, part) for part in ("train", "t10k"))
    if train_pair is None:
        raise DataError(
            f'data.source = "{source}": {folder} has no train-images-idx3-ubyte and '
            f"train-labels-idx1-ubyte (.gz or not): name a folder that has them"
        )
    images = IdxImages(*train_pair)
    if held_out_pair is None:
        train, held_out = _split(images, val_fraction, seed)
        return _of_samples(train, held_out, images.num_classes)
    others = IdxImages(*held_out_pair)
    return _of_samples(images, others, max(images.num_classes, others.num_classes))


def open_dataset(dataset: MapDataset, val_fraction: float, seed: int) -> DataSource:
    """Open any map-style data set, with its attribute `num_classes` if it has one."""
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise DataError(
                f"the data set of data.source is a {type(dataset).__name__} without {method}: "
                f"give a map-style data set, with a length and samples by index"
            )
    train, held_out = _split(dataset, val_fraction, seed)
    return _of_samples(train, held_out, int(getattr(dataset, "num_classes", 0)))


def _split(dataset: MapDataset, fraction: float, seed: int) -> tuple[MapDataset, MapDataset | None]:
    train, held_out = split_indices(len(dataset), fraction, seed)
    return Subset(dataset, train), Subset(dataset, held_out) if len(held_out) else None


def _of_samples(train: MapDataset, held_out: MapDataset | None, num_classes: int) -> DataSource:
    inputs, _ = read_sample(train, 0)
    return DataSource(
        train=train,
        held_out=held_out,
        num_classes=num_classes,
        input_shape=tuple(inputs.shape),
        tokens_per_sample=1,
    )
