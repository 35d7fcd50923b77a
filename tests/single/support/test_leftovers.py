"""Segments of shared memory count as left behind only if nobody uses or removes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.leftovers import SHARED_MEMORY, abandoned_segments, segments

GRACE_S = 0.3


@pytest.fixture
def unused() -> Iterator[Path]:
    """Yield a file in shared memory that no process has mapped."""
    path = SHARED_MEMORY / f"ganglion-test-{os.getpid()}"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_a_new_segment_that_nobody_uses_is_abandoned(unused: Path) -> None:
    assert str(unused) in abandoned_segments(segments() - {str(unused)}, GRACE_S)


def test_a_segment_that_was_there_before_is_not(unused: Path) -> None:
    assert str(unused) not in abandoned_segments(segments(), GRACE_S)


def test_a_segment_that_is_removed_late_is_not(
    unused: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = segments() - {str(unused)}
    monkeypatch.setattr(leftovers.time, "sleep", lambda _: unused.unlink(missing_ok=True))
    assert str(unused) not in abandoned_segments(before, GRACE_S)


def test_a_mapped_segment_is_not() -> None:
    before = segments()
    memory = SharedMemory(create=True, size=4096)
    try:
        assert str(SHARED_MEMORY / memory.name) in segments() - before
        assert str(SHARED_MEMORY / memory.name) not in abandoned_segments(before, GRACE_S)
    finally:
        memory.close()
        memory.unlink()
