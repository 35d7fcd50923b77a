"""The corpus: which files a source means, and sources that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ganglion.errors import DataError
from ganglion.execute.data.corpus import find_files, read_documents, source_root


def test_default_source_is_the_standard_library_without_tests() -> None:
    files = find_files("")
    root = source_root("")
    names = [path.relative_to(root).as_posix() for path in files]
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert not [name for name in names if left_out & set(name.split("/"))]


def test_a_folder_gives_its_text_files_sorted(tmp_path: Path) -> None:
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "sub" / "c").write_text("c")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "sub" / ".git" / "config").write_text("no")
    (tmp_path / "binary").write_bytes(b"x" * 100 + b"\0")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    files = find_files(str(tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path in files] == ["a.md", "b.txt", "sub/c"]
    assert list(read_documents(files)) == [b"a", b"b", b"c"]


def test_order_is_that_of_whole_names_not_of_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z").write_text("1")
    (tmp_path / "a-b").write_text("2")
    names = [path.relative_to(tmp_path).as_posix() for path in find_files(str(tmp_path))]
    assert names == ["a-b", "a/z"]


def test_a_file_is_itself_even_if_hidden_or_binary(tmp_path: Path) -> None:
    path = tmp_path / ".data"
    path.write_bytes(b"\0\1")
    assert find_files(str(path)) == [path]
    assert source_root(str(path)) == tmp_path


def test_missing_source_is_refused_with_key_and_path(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(DataError, match=r"data\.source = .*nowhere.* does not exist"):
        find_files(str(missing))


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source = .* is empty: 0 text files"):
        find_files(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"is empty: 1 text files with 0 bytes"):
        find_files(str(tmp_path))
    with pytest.raises(DataError, match="is empty"):
        find_files(str(tmp_path / "empty.txt"))


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt of data\.source cannot be read: No such file"):
        list(read_documents([tmp_path / "gone.txt"]))
