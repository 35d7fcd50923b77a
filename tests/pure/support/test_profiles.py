"""The small profile of Hypothesis draws the same examples in every process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import FEWEST, SMALL, VARIABLE, chosen, examples


def drawn() -> list[int]:
    found: list[int] = []

    @settings(max_examples=300, derandomize=True, database=None)
    @given(st.integers())
    def draw(number: int) -> None:
        found.append(number)

    draw()
    return found


@pytest.mark.skipif(chosen() != SMALL, reason="only the small profile draws the same each time")
def test_examples_do_not_depend_on_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, fresh = drawn(), ModuleType("fresh")
    fresh.__file__ = str(tmp_path / "fresh.py")
    Path(fresh.__file__).write_text("NUMBERS = (123_123, 456_456, 789_789)")
    monkeypatch.setitem(sys.modules, "fresh", fresh)
    assert drawn() == before


@pytest.mark.parametrize(
    ("thorough", "small"), [(6000, 300), (400, FEWEST), (60, FEWEST), (12, 12)]
)
def test_the_small_profile_tries_a_share(
    thorough: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert examples(thorough) == small
    monkeypatch.setenv(VARIABLE, "thorough")
    assert examples(thorough) == thorough
