"""Names and folders: only whole checkpoints are ever listed, and deleting never leaves halves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint import (
    checkpoint_name,
    latest_checkpoint,
    list_checkpoints,
    prune,
    remove_incomplete,
    step_of,
)
from ganglion.execute.checkpoint.layout import publish


def make(folder: Path, name: str, content: str = "{}") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(content)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_names_and_steps_are_inverse() -> None:
    assert checkpoint_name(10) == "step-00000010"
    for step in (0, 7, 99_999_999, 123_456_789):
        assert step_of(Path("runs") / checkpoint_name(step)) == step


def test_only_whole_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    for step in (123_456_789, 20, 3):
        make(tmp_path, checkpoint_name(step))
    for foreign in ("step-00000040.incomplete", "step-00000041.replaced", "step-5", "notes"):
        make(tmp_path, foreign)
    (tmp_path / "step-00000050").mkdir()
    (tmp_path / "step-00000060").write_text("a file")
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 20, 123_456_789]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-123456789"


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    assert latest_checkpoint(tmp_path / "none") is None
    remove_incomplete(tmp_path / "none")
    prune(tmp_path / "none", 1)


def test_remove_incomplete_touches_only_our_own_leftovers(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002.incomplete", "mine.incomplete", "step-3.replaced"):
        make(tmp_path, name)
    remove_incomplete(tmp_path)
    assert names(tmp_path) == ["mine.incomplete", "step-00000001", "step-3.replaced"]


def test_a_replaced_checkpoint_comes_back_when_its_successor_never_came(tmp_path: Path) -> None:
    make(tmp_path, "step-00000001.replaced", "old")
    make(tmp_path, "step-00000002.replaced", "old")
    make(tmp_path, "step-00000002", "new")
    remove_incomplete(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert (tmp_path / "step-00000001/manifest.json").read_text() == "old"
    assert (tmp_path / "step-00000002/manifest.json").read_text() == "new"


def test_prune_keeps_the_newest_and_the_spared(tmp_path: Path) -> None:
    for step in range(1, 6):
        make(tmp_path, checkpoint_name(step))
    prune(tmp_path, 2, spare=tmp_path / checkpoint_name(1))
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1, 4, 5]
    assert len(names(tmp_path)) == 3
    prune(tmp_path, 9)
    assert len(names(tmp_path)) == 3


def test_publish_replaces_a_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    final = make(tmp_path, "step-00000001", "old")
    publish(make(tmp_path, "step-00000001.incomplete", "new"), final)
    assert names(tmp_path) == ["step-00000001"]
    assert (final / "manifest.json").read_text() == "new"


def test_a_failed_publish_puts_the_old_checkpoint_back(tmp_path: Path) -> None:
    final = make(tmp_path, "step-00000001", "old")
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "step-00000001.incomplete", final)
    assert names(tmp_path) == ["step-00000001"]
    assert (final / "manifest.json").read_text() == "old"


def test_a_folder_that_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make(tmp_path, checkpoint_name(step))

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"cannot delete .*step-00000001: Permission denied;"):
        prune(tmp_path, 1)
