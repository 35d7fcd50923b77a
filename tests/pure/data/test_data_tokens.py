"""The token file: contents, reuse, damage and races."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from ganglion.errors import DataError
from ganglion.execute.data import tokens
from ganglion.execute.data.tokens import TokenFile, prepare_tokens, token_dtype


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"first")
    (folder / "b.txt").write_bytes(b"second\xff")
    return folder


def prepare(corpus: Path) -> TokenFile:
    return prepare_tokens(str(corpus), "bytes", 4096, corpus.parent / "cache")


def contents(file: TokenFile) -> bytes:
    return file.open().tobytes()


@pytest.fixture
def no_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(tokens, "_build", refuse)


def test_documents_are_joined_by_newlines(corpus: Path) -> None:
    file = prepare(corpus)
    assert contents(file) == b"first\nsecond\xff"
    assert file.num_tokens == 13
    assert file.vocab_size == 256
    ids = file.open()
    assert ids.dtype == np.uint8
    assert not ids.flags.writeable


def test_cache_is_reused(corpus: Path, request: pytest.FixtureRequest) -> None:
    first = prepare(corpus)
    request.getfixturevalue("no_building")
    again = prepare(corpus)
    assert again.path == first.path
    assert contents(again) == contents(first)


def test_the_vocabulary_of_bpe_does_not_matter_to_bytes(
    corpus: Path, request: pytest.FixtureRequest
) -> None:
    first = prepare(corpus)
    request.getfixturevalue("no_building")
    other = prepare_tokens(str(corpus), "bytes", 300, corpus.parent / "cache")
    assert other.path == first.path


def test_changed_contents_are_seen_even_with_same_size_and_time(corpus: Path) -> None:
    prepare(corpus)
    stat = (corpus / "a.txt").stat()
    (corpus / "a.txt").write_bytes(b"FIRST")
    os.utime(corpus / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert contents(prepare(corpus)) == b"FIRST\nsecond\xff"


def test_a_renamed_file_changes_the_order(corpus: Path) -> None:
    prepare(corpus)
    (corpus / "a.txt").rename(corpus / "c.txt")
    assert contents(prepare(corpus)) == b"second\xff\nfirst"


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no record", "bad record"])
def test_damaged_cache_is_rebuilt(corpus: Path, damage: str) -> None:
    file = prepare(corpus)
    (record,) = file.path.parent.glob("*.json")
    if damage == "truncated":
        file.path.write_bytes(contents(file)[:-1])
    elif damage == "changed":
        file.path.write_bytes(b"x" * file.num_tokens)
    elif damage == "missing":
        file.path.unlink()
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text(record.read_text()[:-20])
    assert contents(prepare(corpus)) == b"first\nsecond\xff"


@pytest.mark.parametrize(("key", "value"), [("num_tokens", 12), ("dtype", "foo"), ("digest", 1)])
def test_record_that_does_not_fit_its_ids_is_rebuilt(corpus: Path, key: str, value: object) -> None:
    (record,) = prepare(corpus).path.parent.glob("*.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), key: value}))
    assert prepare(corpus).num_tokens == 13
    assert json.loads(record.read_text())[key] != value


def test_all_who_prepare_at_once_agree_and_leave_nothing_behind(corpus: Path) -> None:
    barrier = Barrier(4)

    def work(_: int) -> bytes:
        barrier.wait()
        return contents(prepare(corpus))

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(work, range(4))) == {b"first\nsecond\xff"}
    names = sorted(path.suffix for path in (corpus.parent / "cache").iterdir())
    assert names == [".json", ".tokens"]


def test_another_may_finish_in_the_middle(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ids = tokens._write_ids

    def overtaken(*args: Any) -> tuple[Path, int]:
        result = write_ids(*args)
        monkeypatch.setattr(tokens, "_write_ids", write_ids)
        assert contents(prepare(corpus)) == b"first\nsecond\xff"
        return result

    monkeypatch.setattr(tokens, "_write_ids", overtaken)
    assert contents(prepare(corpus)) == b"first\nsecond\xff"


def test_a_file_that_changes_while_it_is_read_is_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tokens._build

    def change_first(*args: Any) -> TokenFile:
        (corpus / "b.txt").write_bytes(b"other")
        return build(*args)

    monkeypatch.setattr(tokens, "_build", change_first)
    with pytest.raises(DataError, match=r"b\.txt of data\.source changed while it was read"):
        prepare(corpus)
    assert list((corpus.parent / "cache").iterdir()) == []


def test_cache_that_cannot_be_written_is_refused(corpus: Path) -> None:
    (corpus.parent / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"token cache .*cache cannot be written"):
        prepare(corpus)


def test_unknown_tokenizer_is_refused(corpus: Path) -> None:
    with pytest.raises(DataError, match=r'data\.tokenizer = "words" is not one of'):
        prepare_tokens(str(corpus), "words", 4096, corpus.parent / "cache")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")]
)
def test_ids_take_the_smallest_type_that_holds_them(vocab_size: int, dtype: str) -> None:
    assert np.dtype(token_dtype(vocab_size)) == np.dtype(dtype)
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1
