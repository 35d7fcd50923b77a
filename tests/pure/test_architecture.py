"""docs/architecture.md shows the real tree: its folders, in the order of the import rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ganglion
from tests.pure.test_layers import DECIDE, EXECUTE

PACKAGE = Path(ganglion.__file__).parent
ROOT = PACKAGE.parent
PAGES = ("docs/architecture.md", "CONTRIBUTING.md")
HALVES = {"decide": DECIDE, "execute": EXECUTE}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pictured_rooms() -> dict[str, list[str]]:
    """Return the rooms of each folder at the top of the package, as the picture shows them."""
    (picture,) = re.findall(r"```\nganglion/\n(.*?)```", page("docs/architecture.md"), re.DOTALL)
    rooms: dict[str, list[str]] = {}
    for line in picture.splitlines():
        indent, name = re.match(r"( +)([\w./]+)  +\S", line).groups()  # type: ignore[union-attr]
        if len(indent) == 2:
            rooms[top := name.rstrip("/")] = []
        else:
            rooms[top].append(name.rstrip("/"))
    return rooms


def real_rooms(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/__init__.py")}


def test_the_picture_shows_every_room() -> None:
    rooms = pictured_rooms()
    assert set(rooms) == real_rooms(PACKAGE)
    for top, shown in rooms.items():
        modules = {path.name for path in (PACKAGE / top).glob("*.py")} - {"__init__.py"}
        folders = real_rooms(PACKAGE / top)
        assert {name for name in shown if not name.endswith(".py")} == folders, top
        if top in HALVES:  # a module beside the folders is a room, too
            assert {name for name in shown if name.endswith(".py")} == modules, top


@pytest.mark.parametrize("half", HALVES)
def test_the_picture_has_the_order_of_the_import_rule(half: str) -> None:
    shown = [name.removesuffix(".py") for name in pictured_rooms()[half]]
    assert shown == [room for room in HALVES[half] if room in shown]


def named_paths(text: str) -> Iterator[str]:
    """Yield the files and folders that a page names, in code or in a picture of files."""
    for code in re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL):
        yield from re.findall(
            r"(?<![\w./-])[a-z_]+/(?:[\w.-]+/)*(?:\w+\.(?:py|md))?(?![\w*])", code
        )


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_is_named_exists(name: str) -> None:
    text = re.sub(r"```\nganglion/\n.*?```", "", page(name), flags=re.DOTALL)
    paths = set(named_paths(text))
    assert len(paths) > 20
    missing = [path for path in paths if not any((top / path).exists() for top in (ROOT, PACKAGE))]
    assert missing == []
