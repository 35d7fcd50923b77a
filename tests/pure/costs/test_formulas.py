"""docs/formulas.md names a test for each formula, and all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PURE = Path(__file__).parents[1]
PAGE = (PURE.parents[1] / "docs" / "formulas.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(\S+\.py)::(\w+)`", PAGE)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_named_test_exists(file: str, test: str) -> None:
    text = (PURE / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"


def test_every_formula_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| .*`\S+\.py`|\| .*`clusters", line)]
    assert len(rows) >= 25
    for row in rows:
        assert re.search(r"`\S+\.py::\w+` \|$", row), row


def test_every_module_of_times_is_on_the_page() -> None:
    folder = PURE.parents[1] / "ganglion" / "decide" / "costs"
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    # These describe a cluster or sum up what the others say.
    helpers = {"cluster.py", "cluster_file.py", "working_memory.py"}
    assert all(f"`{name}`" in PAGE for name in modules - helpers)
