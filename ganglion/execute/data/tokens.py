"""The token file: a corpus turned into ids once, then mapped into memory by every process.

    cache folder    KEY.json          num_tokens, dtype, digest and tokenizer; points to
                    DIGEST.tokens     the ids, nothing else

KEY is a hash of everything the ids depend on, with the contents of the files; DIGEST is a hash of
the ids. The record is renamed into place after the ids, so processes that prepare the same corpus
at once need no lock: the last record names complete ids of its own tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ganglion.errors import DataError
from ganglion.execute.data.corpus import find_files, read_documents, source_root
from ganglion.execute.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    partial_file,
    tokenizer_from_json,
)

TOKENS_FORMAT = 1
SEPARATOR = b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of token ids, complete and checked, and the tokenizer that made it."""

    path: Path
    num_tokens: int
    dtype: str
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of ids of the tokenizer."""
        return self.tokenizer.vocab_size

    def open(self) -> np.memmap[Any, np.dtype[Any]]:
        """Return the ids, mapped into memory and read-only."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))


@dataclass(frozen=True, slots=True)
class _Document:
    """A file of the corpus as it was when the key was made."""

    path: Path
    name: str
    digest: str

    def read(self) -> bytes:
        """Return the contents; refuse a file that changed after the key was made."""
        (text,) = read_documents([self.path])
        if hashlib.sha256(text).hexdigest() != self.digest:
            raise DataError(
                f"{self.path} of data.source changed while it was read: start again when "
                f"nothing writes to it"
            )
        return text


def prepare_tokens(
    source: str, tokenizer_kind: str, bpe_vocab_size: int, cache_dir: Path
) -> TokenFile:
    """Return the token file of a source, from the cache if it is complete there."""
    if tokenizer_kind not in (ByteTokenizer.name, BpeTokenizer.name):
        raise DataError(f'data.tokenizer = "{tokenizer_kind}" is not one of "bytes", "bpe"')
    vocab_size = bpe_vocab_size if tokenizer_kind == BpeTokenizer.name else 256
    documents = _documents(source)
    record_path = cache_dir / f"{_key(documents, tokenizer_kind, vocab_size)}.json"
    cached = _read_record(record_path)
    if cached is not None:
        return cached
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return _build(documents, tokenizer_kind, vocab_size, record_path)
    except OSError as error:
        raise DataError(
            f"the token cache {cache_dir} cannot be written: {error}; "
            f"choose a folder with room that you may write to"
        ) from error


def token_dtype(vocab_size: int) -> str:
    """Return the smallest unsigned dtype for all ids, with its byte order."""
    if vocab_size <= 1 << 8:
        return "|u1"
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _documents(source: str) -> list[_Document]:
    root = source_root(source)
    files = find_files(source)
    return [
        _Document(path, path.relative_to(root).as_posix(), hashlib.sha256(text).hexdigest())
        for path, text in zip(files, read_documents(files), strict=True)
    ]


def _key(documents: list[_Document], tokenizer_kind: str, vocab_size: int) -> str:
    parts = [TOKENS_FORMAT, tokenizer_kind, vocab_size]
    names = [[document.name, document.digest] for document in documents]
    return hashlib.sha256(json.dumps([parts, names]).encode()).hexdigest()[:32]


def _read_record(record_path: Path) -> TokenFile | None:
    """Return the token file that a record names, or None if either is missing or damaged."""
    try:
        record = json.loads(record_path.read_bytes())
        path = record_path.parent / f"{record['digest']}.tokens"
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_tokens, dtype = int(record["num_tokens"]), str(record["dtype"])
        expected_bytes = num_tokens * np.dtype(dtype).itemsize
        tokenizer_json = json.dumps(record["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if size_bytes != expected_bytes or digest != record["digest"]:
        return None
    tokenizer = tokenizer_from_json(tokenizer_json, str(record_path))
    return TokenFile(path=path, num_tokens=num_tokens, dtype=dtype, tokenizer=tokenizer)


def _build(
    documents: list[_Document], tokenizer_kind: str, vocab_size: int, record_path: Path
) -> TokenFile:
    tokenizer: Tokenizer = ByteTokenizer()
    if tokenizer_kind == BpeTokenizer.name:
        texts = (document.read() for document in documents)
        tokenizer = BpeTokenizer.train(texts, vocab_size)
    dtype = token_dtype(tokenizer.vocab_size)
    path, num_tokens = _write_ids(_encoded(documents, tokenizer, dtype), record_path.parent)
    record = {
        "format": TOKENS_FORMAT,
        "digest": path.stem,
        "num_tokens": num_tokens,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": json.loads(tokenizer.to_json()),
    }
    with partial_file(record_path.parent) as partial:
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(record_path)
    return TokenFile(path=path, num_tokens=num_tokens, dtype=dtype, tokenizer=tokenizer)


def _encoded(
    documents: list[_Document], tokenizer: Tokenizer, dtype: str
) -> Iterator[npt.NDArray[Any]]:
    for number, document in enumerate(documents):
        separator = SEPARATOR if number else b""
        yield tokenizer.encode(separator + document.read()).astype(dtype)


def _write_ids(parts: Iterator[npt.NDArray[Any]], folder: Path) -> tuple[Path, int]:
    """Write ids to a file named by their digest; return it and their number."""
    digest = hashlib.sha256()
    num_tokens = 0
    with partial_file(folder) as partial:
        with partial.open("wb") as file:
            for part in parts:
                block = part.tobytes()
                file.write(block)
                digest.update(block)
                num_tokens += len(part)
        path = folder / f"{digest.hexdigest()}.tokens"
        partial.replace(path)
    return path, num_tokens
