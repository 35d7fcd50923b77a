"""The BPE tokenizer and its token file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ganglion.errors import DataError
from ganglion.execute.data import tokenizers
from ganglion.execute.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    load_tokenizer,
    save_tokenizer,
)
from ganglion.execute.data.tokens import prepare_tokens

TEXT = (
    "the quick brown fox jumps over the lazy dog\n  and gr\u00fc\u00dft \u4e16\u754c\n" * 20
).encode()


@pytest.fixture
def tokenizer() -> BpeTokenizer:
    pytest.importorskip("tokenizers")
    return BpeTokenizer.train([TEXT, b"another text"], 300)


def test_text_survives_the_round_trip_in_fewer_tokens(tokenizer: BpeTokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT.decode()
    assert len(ids) < len(TEXT) / 1.5
    assert tokenizer.vocab_size == 300
    assert ids.max() < 300


def test_bytes_never_seen_in_training_survive(tokenizer: BpeTokenizer) -> None:
    text = "\x00\x7f\u20ac \U0001f600 QZ\r\n\t"
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_empty_text_has_no_tokens(tokenizer: BpeTokenizer) -> None:
    assert tokenizer.encode(b"").tolist() == []
    assert tokenizer.decode([]) == ""


def test_what_is_not_text_or_not_an_id_shows_as_replacement(tokenizer: BpeTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\ufffdb"
    (letter,) = tokenizer.encode(b"Q").tolist()
    assert tokenizer.decode([letter, 300, letter, -1]) == "Q\ufffdQ\ufffd"


def test_training_is_deterministic(tokenizer: BpeTokenizer) -> None:
    again = BpeTokenizer.train(iter([TEXT, b"another text"]), 300)
    assert again.to_json() == tokenizer.to_json()


def test_long_texts_go_in_by_pieces(
    tokenizer: BpeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_PIECE_CHARS", 50)
    text = TEXT + b"x" * 130 + b"\n"
    pieces = list(tokenizers._pieces(text))
    assert "".join(pieces) == text.decode()
    assert max(map(len, pieces)) <= 50
    assert pieces[0].endswith("\n")
    assert tokenizer.decode(tokenizer.encode(text)) == text.decode()


def test_saved_tokenizer_loads_equal(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.name == "bpe"
    assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_damaged_bpe_file_is_refused(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"kind": "bpe", "tokenizer": {"version": "1.0"}}')
    with pytest.raises(DataError, match=r"tokenizer\.json holds a BPE tokenizer that cannot"):
        load_tokenizer(tmp_path)


def test_vocabulary_smaller_than_the_bytes_is_refused(tokenizer: BpeTokenizer) -> None:
    with pytest.raises(DataError, match=r"data\.bpe_vocab_size = 255 is too small"):
        BpeTokenizer.train([TEXT], 255)


def test_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text('{"kind": "bpe", "tokenizer": {}}')
    message = r'data\.tokenizer = "bpe" needs .*pip install ganglion\[hf\]'
    with pytest.raises(DataError, match=message):
        BpeTokenizer.train([TEXT], 300)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_token_file_keeps_its_tokenizer(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.txt").write_bytes(b"the end")
    first = prepare_tokens(str(tmp_path), "bpe", 300, tmp_path / ".cache")
    again = prepare_tokens(str(tmp_path), "bpe", 300, tmp_path / ".cache")
    assert first.vocab_size == again.vocab_size == 300
    assert first.open().dtype == np.uint16
    assert again.tokenizer.decode(again.open()) == TEXT.decode() + "\nthe end"
    assert again.tokenizer.to_json() == first.tokenizer.to_json()


def test_token_files_of_other_vocabularies_are_apart(
    tokenizer: BpeTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    sizes = [
        prepare_tokens(str(tmp_path), "bpe", size, tmp_path / ".cache").vocab_size
        for size in (300, 280, 300)
    ]
    assert sizes == [300, 280, 300]
    bytes_file = prepare_tokens(str(tmp_path), "bytes", 300, tmp_path / ".cache")
    assert isinstance(bytes_file.tokenizer, ByteTokenizer)
