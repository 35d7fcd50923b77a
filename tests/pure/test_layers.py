"""The layering holds: no import leaves the table, and no decider touches torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ganglion
from tests.layers import ANYTHING, DECIDERS, MAY_IMPORT, OPEN_TO_ALL

PACKAGE = Path(ganglion.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    """Return the folder below the package, or the module at its top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Yield every module a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_units(path: Path) -> set[str]:
    modules = (name.split(".") for name in imported_modules(path))
    return {parts[1] for parts in modules if parts[0] == "ganglion" and len(parts) > 1}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stay_inside_the_table(path: Path) -> None:
    unit = unit_of(path)
    if unit in ANYTHING:
        return
    assert unit in MAY_IMPORT, f"{unit} is not in the import table: add it, with its reason"
    known = set(MAY_IMPORT) | {"cli"}
    forbidden = (imported_units(path) & known) - MAY_IMPORT[unit] - OPEN_TO_ALL - {unit}
    assert not forbidden, f"{path.relative_to(PACKAGE)} may not import {sorted(forbidden)}"


def test_the_table_has_no_cycle() -> None:
    left = {unit: set(allowed) for unit, allowed in MAY_IMPORT.items()}
    while left:
        free = [unit for unit, allowed in left.items() if not allowed & set(left)]
        assert free, f"cycle among {sorted(left)}"
        for unit in free:
            del left[unit]


@pytest.mark.parametrize("path", [p for p in FILES if unit_of(p) in DECIDERS], ids=str)
def test_deciders_do_not_name_torch(path: Path) -> None:
    assert not [name for name in imported_modules(path) if name.split(".")[0] == "torch"]


def test_no_device_wide_synchronize() -> None:
    guilty = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if "cuda.synchronize" in path.read_text(encoding="utf-8")
    ]
    assert not guilty, f"use stream events instead of torch.cuda.synchronize: {guilty}"


def test_environment_is_read_at_the_edges_only() -> None:
    allowed = {"cli", "train/parallelize.py", "averaging/average.py"}
    guilty = []
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text(encoding="utf-8")
        if ("os.environ" in text or "getenv" in text) and not (
            unit_of(path) in allowed or name in allowed
        ):
            guilty.append(name)
    assert not guilty
