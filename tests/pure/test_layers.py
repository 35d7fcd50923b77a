"""The import rule: two halves, the record that both write, and what people touch.

    trace -> nothing                     report -> trace, decide
    decide -> trace                      cli -> anything ; nothing -> cli
    execute -> trace, and of decide: topology, plan, schedules, shapes, costs, config

Inside a half a room imports only rooms that stand before it in the lists below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ganglion

PACKAGE = Path(ganglion.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
OPEN_TO_ALL = {"errors", "lazy", "reference", "units"}
DECIDE = (
    *("topology", "plan", "schedules", "shapes", "costs", "config"),
    *("simulator", "predict", "planner"),
)
EXECUTE = (
    *("device", "comm", "models", "data", "tensor", "gradients", "offload", "update"),
    *("pipeline", "averaging", "checkpoint", "measure", "train"),
)
KNOWN_TO_EXECUTE = DECIDE[: DECIDE.index("simulator")]
# Joined in train only.
APART = {"models", "data", "tensor", "averaging"}


def room_of(parts: list[str]) -> tuple[str, str]:
    """Return the half and the room of a module, given by its name without `ganglion`."""
    parts = [part.removesuffix(".py") for part in parts]
    return parts[0], parts[1] if len(parts) > 1 and parts[0] in ("decide", "execute") else ""


def imported_modules(path: Path) -> Iterator[str]:
    """Yield every module a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(path: Path) -> set[tuple[str, str]]:
    modules = (name.split(".") for name in imported_modules(path))
    rooms = {room_of(parts[1:]) for parts in modules if parts[0] == "ganglion" and len(parts) > 1}
    return {(half, room) for half, room in rooms if half not in ("decide", "execute") or room}


def may_import(mine: tuple[str, str], other: tuple[str, str]) -> bool:
    """Return whether a room may import another."""
    (half, room), (other_half, other_room) = mine, other
    if half in ("cli", "__init__", "__main__") or mine == other or other_half in OPEN_TO_ALL:
        return True
    if half == other_half == "decide":
        return DECIDE.index(other_room) < DECIDE.index(room)
    if half == other_half == "execute":
        joined = {room, other_room} <= APART
        return EXECUTE.index(other_room) < EXECUTE.index(room) and not joined
    if half == "execute":
        return other_half == "trace" or (other_half == "decide" and other_room in KNOWN_TO_EXECUTE)
    return other_half in {"decide": ("trace",), "report": ("trace", "decide")}.get(half, ())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_rule(path: Path) -> None:
    mine = room_of(list(path.relative_to(PACKAGE).parts))
    if mine[1] == "__init__":
        mine = (mine[0], "")
    forbidden = [other for other in imported_rooms(path) if not may_import(mine, other)]
    assert not forbidden, f"{path.relative_to(PACKAGE)} may not import {sorted(forbidden)}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.relative_to(PACKAGE).parts[0] in ("decide", "trace")], ids=str
)
def test_what_decides_does_not_name_torch(path: Path) -> None:
    assert not [name for name in imported_modules(path) if name.split(".")[0] == "torch"]


def test_other_rooms_are_imported_through_their_init() -> None:
    """A module inside a package is an address that moves; what the package exports is not."""
    guilty = []
    for path in FILES:
        folder = path.relative_to(PACKAGE).parent
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            parts = (module or "").split(".")
            target = PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
            outside = parts[0] != "ganglion" or len(parts) == 2
            if outside or not target.exists() or path.name == "__main__.py":
                continue
            inside = target.parent.relative_to(PACKAGE)
            if inside != Path("decide") and inside not in (folder, *folder.parents):
                guilty.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not guilty, "\n".join(guilty)


def test_no_device_wide_synchronize() -> None:
    guilty = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if "cuda.synchronize" in path.read_text(encoding="utf-8")
    ]
    assert not guilty, f"use stream events instead of torch.cuda.synchronize: {guilty}"


def test_environment_is_read_at_the_edges_only() -> None:
    allowed = {"execute/train/parallelize.py", "execute/averaging/average.py"}
    guilty = []
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text(encoding="utf-8")
        reads = "os.environ" in text or "getenv" in text
        if reads and not (name.startswith("cli/") or name in allowed):
            guilty.append(name)
    assert not guilty
