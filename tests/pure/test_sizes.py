"""Size is a budget: folders fit a glance, files hold one idea, functions fit a screen."""

from __future__ import annotations

import ast
import functools
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ganglion

MAX_FOLDER_FILES = 15
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 12
PACKAGE = Path(ganglion.__file__).parent


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """Parse every file of the package, once."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def functions() -> Iterator[tuple[str, int]]:
    """Yield every function with its number of lines, docstring left out."""
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                yield f"{path.relative_to(PACKAGE)}:{node.name}", lines


def test_folders_are_small() -> None:
    sizes = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    assert {folder: n for folder, n in sizes.items() if n > MAX_FOLDER_FILES} == {}


def test_files_are_short() -> None:
    sizes = {p: p.read_text(encoding="utf-8").count("\n") for p in PACKAGE.rglob("*.py")}
    assert {str(p): n for p, n in sizes.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    sizes = list(functions())
    assert [(name, n) for name, n in sizes if n > MAX_FUNCTION_LINES] == []
    assert statistics.median(n for _, n in sizes) <= MAX_MEDIAN_FUNCTION_LINES


def test_every_module_states_its_idea() -> None:
    silent = [
        str(path.relative_to(PACKAGE))
        for path, module in modules().items()
        if not ast.get_docstring(module)
    ]
    assert silent == []
