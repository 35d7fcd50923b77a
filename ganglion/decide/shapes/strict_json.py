"""Strict reading of JSON: each value knows its place, so that an error names it.

model.json: blocks.attention.parameters[0].shape[1] = -3 is no whole number of at least 1
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ganglion.errors import ConfigError, UnknownKeyError

_Value = TypeVar("_Value")


def read_json(text: str, source: str, remedy: str) -> Node:
    """Return the root of JSON text; `source` and `remedy` are for its error."""
    try:
        return Node(value=json.loads(text), path="", source=source)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not JSON: {error}; {remedy}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value of a JSON file, with its path there."""

    value: Any
    path: str
    source: str

    def error(self, complaint: str) -> ConfigError:
        """Return an error that names the file and the place."""
        place = f"{self.source}: {self.path} " if self.path else f"{self.source} "
        return ConfigError(f"{place}{complaint}")

    def require_format(self, number: int, what: str) -> None:
        """Raise ConfigError unless this is an object with this format number."""
        if not isinstance(self.value, dict) or self.value.get("format") != number:
            raise self.error(f'is no {what} of format {number}: it needs "format": {number}')

    def entries(self) -> dict[str, Node]:
        """Return the entries of an object."""
        if not isinstance(self.value, dict):
            raise self._wrong("an object of keys and values")
        return {key: self._child(f".{key}", item) for key, item in self.value.items()}

    def table(self, *, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Node]:
        """Return the entries of an object whose keys are known; refuse any other key."""
        found, known = self.entries(), [*required, *optional]
        where = self.path or "the file"
        for key in found:
            if key not in known:
                raise UnknownKeyError(
                    f"{self.source}: unknown key {key!r} in {where}; {_nearest(key, known)}"
                )
        for key in required:
            if key not in found:
                raise ConfigError(f"{self.source}: {where} has no {key!r}: add it")
        return found

    def items(self) -> list[Node]:
        """Return the items of a list."""
        if not isinstance(self.value, list):
            raise self._wrong("a list")
        return [self._child(f"[{number}]", item) for number, item in enumerate(self.value)]

    def words(self) -> list[Node]:
        """Return the words of a text."""
        return [replace(self, value=word) for word in self.text().split()]

    def number(self, least: int = 0, most: int | None = None) -> int:
        """Return a whole number of at least `least` and at most `most`."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(f"a whole number of at least {least}")
        if most is not None and value > most:
            raise self._wrong(f"a whole number of at most {most}")
        return int(value)

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str):
            raise self._wrong("a text")
        return self.value

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self._wrong("true or false")
        return self.value

    def choice(self, known: Sequence[str]) -> str:
        """Return one of some texts."""
        if self.text() not in known:
            raise self.error(
                f"= {json.dumps(self.value)} is not known; {_nearest(self.value, known)}"
            )
        return self.text()

    def parsed(self, parse: Callable[[str], _Value]) -> _Value:
        """Return what is read from a text; `parse` raises ConfigError if it cannot."""
        try:
            return parse(self.text())
        except ConfigError as error:
            raise self.error(f"cannot be read: {error}") from error

    def _child(self, step: str, value: Any) -> Node:
        return Node(value=value, path=f"{self.path}{step}".removeprefix("."), source=self.source)

    def _wrong(self, wanted: str) -> ConfigError:
        return self.error(f"= {json.dumps(self.value)[:60]} is not {wanted}: correct it")


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {list(known)}"
