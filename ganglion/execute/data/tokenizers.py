"""Tokenizers: bytes of text to token ids and back, and their file.

For `bytes` the ids are the bytes. `bpe` is a byte-level BPE of the `tokenizers` package,
trained on the corpus; it works on Unicode, so bytes that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ganglion.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as InnerTokenizer

TOKENIZER_FILE = "tokenizer.json"
# The package keeps over 100 bytes for each token of one call, so long texts are cut.
_PIECE_CHARS = 1 << 20
# U+FFFD as byte-level BPE spells its three UTF-8 bytes.
_REPLACEMENT = "\u00ef\u00bf\u00bd"


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def name(self) -> str:
        """The kind, as `data.tokenizer` spells it."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are; ids count from 0."""

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        """Return the ids of a text."""

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of ids; invalid text and unknown ids become U+FFFD."""

    def to_json(self) -> str:
        """Return JSON that `tokenizer_from_json` reads back."""


class ByteTokenizer:
    """Every byte is a token: 256 ids, nothing to train, lossless."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: bytes) -> npt.NDArray[np.uint8]:
        """Return the bytes themselves."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of ids."""
        unknown = "\ufffd".encode()
        numbers = (int(number) for number in ids)
        parts = (bytes((number,)) if 0 <= number < 256 else unknown for number in numbers)
        return b"".join(parts).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return the kind."""
        return json.dumps({"kind": self.name})


class BpeTokenizer:
    """Byte-level BPE; make one with `train` or `tokenizer_from_json`."""

    name = "bpe"

    def __init__(self, inner: InnerTokenizer) -> None:
        self._inner = inner

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
        """Train on texts; a small corpus may give fewer than `vocab_size` ids."""
        _require_package()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab_size < 256:
            raise DataError(
                f"data.bpe_vocab_size = {vocab_size} is too small: the bytes alone take 256 ids"
            )
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        pieces = (piece for text in texts for piece in _pieces(text))
        inner.train_from_iterator(pieces, trainer)
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """How many ids training gave."""
        return int(self._inner.get_vocab_size())

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """Return the ids of a text."""
        parts = [np.array(self._inner.encode(piece).ids, np.uint32) for piece in _pieces(text)]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of ids."""
        tokens = (self._token(int(number)) for number in ids)
        return str(self._inner.decoder.decode(list(tokens)))

    def _token(self, number: int) -> str:
        known = 0 <= number < self.vocab_size
        return str(self._inner.id_to_token(number)) if known else _REPLACEMENT

    def to_json(self) -> str:
        """Return the whole trained tokenizer."""
        return json.dumps({"kind": self.name, "tokenizer": json.loads(self._inner.to_str())})


def tokenizer_from_json(text: str, source: str) -> Tokenizer:
    """Read what `to_json` wrote; `source` names the file in error messages."""
    try:
        record = json.loads(text)
        kind = record["kind"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{source} is not a tokenizer: {error!r}; delete it to have it made again"
        ) from error
    if kind == ByteTokenizer.name:
        return ByteTokenizer()
    if kind == BpeTokenizer.name:
        return _bpe_from_record(record, source)
    raise DataError(f"{source} holds a tokenizer of the unknown kind {kind!r}, not bytes or bpe")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """Write `tokenizer.json` into a folder that exists; a reader never sees half a file."""
    path = folder / TOKENIZER_FILE
    with partial_file(folder) as partial:
        partial.write_text(tokenizer.to_json(), encoding="utf-8")
        partial.replace(path)
    return path


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the `tokenizer.json` of a folder."""
    path = folder / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"no tokenizer can be read from {path}: {error}; name the folder that holds it"
        ) from error
    return tokenizer_from_json(text, str(path))


def _bpe_from_record(record: dict[str, Any], source: str) -> BpeTokenizer:
    _require_package()
    from tokenizers import Tokenizer

    try:
        return BpeTokenizer(Tokenizer.from_str(json.dumps(record["tokenizer"])))
    except Exception as error:  # the package raises plain Exception for text it cannot read
        raise DataError(
            f"{source} holds a BPE tokenizer that cannot be read: {error!r}; "
            f"delete it to have it made again"
        ) from error


def _require_package() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise DataError(
            'data.tokenizer = "bpe" needs the package `tokenizers`: pip install ganglion[hf]'
        ) from error


def _pieces(text: bytes) -> Iterator[str]:
    """Cut a text into strings of bounded length, after a newline where there is one."""
    whole = text.decode("utf-8", errors="replace")
    start = 0
    while start < len(whole):
        limit = start + _PIECE_CHARS
        newline = whole.rfind("\n", start, limit) if limit < len(whole) else -1
        stop = newline + 1 if newline >= 0 else limit
        yield whole[start:stop]
        start = stop


@contextmanager
def partial_file(folder: Path) -> Iterator[Path]:
    """Yield an unused hidden path in `folder`; remove the file at the end if not renamed."""
    path = folder / f".partial-{uuid.uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
