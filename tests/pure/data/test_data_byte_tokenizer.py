"""The byte tokenizer, and the file that keeps a tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.errors import DataError
from ganglion.execute.data.tokenizers import ByteTokenizer, load_tokenizer, save_tokenizer


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text.encode())
    assert ids.dtype == np.uint8
    assert tokenizer.decode(ids) == text


def test_ids_are_the_bytes() -> None:
    assert ByteTokenizer().encode(b"\x00a\xff").tolist() == [0, 97, 255]
    assert ByteTokenizer().vocab_size == 256


def test_what_is_not_text_or_not_an_id_shows_as_replacement() -> None:
    assert ByteTokenizer().decode([97, 255, 98]) == "a\ufffdb"
    assert ByteTokenizer().decode([97, 256, -1, 98]) == "a\ufffd\ufffdb"
    assert ByteTokenizer().decode(np.array([97, 98], dtype=np.int64)) == "ab"


def test_saved_tokenizer_loads(tmp_path: Path) -> None:
    path = save_tokenizer(ByteTokenizer(), tmp_path)
    assert path == tmp_path / "tokenizer.json"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer.json"]
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a tokenizer"),
        ("[]", "is not a tokenizer"),
        ("{}", "is not a tokenizer"),
        ('{"kind": "words"}', "unknown kind 'words'"),
    ],
)
def test_damaged_tokenizer_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=rf"tokenizer\.json .*{message}"):
        load_tokenizer(tmp_path)


def test_missing_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer can be read from .*tokenizer\.json"):
        load_tokenizer(tmp_path)
