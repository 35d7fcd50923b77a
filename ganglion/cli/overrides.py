"""Keys of the run file as options: `--section.key value` pairs, split off before typer parses.

Every command that takes a run file takes every key, without declaring them one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ganglion.errors import ConfigError

Overrides = tuple[tuple[str, str], ...]  # keys and their text, in order

TAKE_OVERRIDES = ("train", "verify", "simulate", "memory", "describe", "plan", "why")
_KEY = re.compile(r"--([a-z_]+(?:\.[a-z_0-9]+)+)(?:=(.*))?", re.DOTALL)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], Overrides]:
    """Return the other arguments, and the overrides as (key, text) pairs in order."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        match = _KEY.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        key, text = match.groups()
        if text is None and not waiting:
            raise ConfigError(f"--{key} needs a value: --{key} VALUE")
        overrides.append((key, waiting.pop(0) if text is None else text))
    return rest, tuple(overrides)


def check_taken(overrides: Overrides, command: str | None) -> None:
    """Refuse run-file keys for a command that reads no run file."""
    if overrides and command not in TAKE_OVERRIDES:
        *others, last = (f"`{name}`" for name in TAKE_OVERRIDES)
        raise ConfigError(
            f"--{overrides[0][0]} is a run-file key: only {', '.join(others)} and {last} take those"
        )
