"""Overrides: `--section.key value` pairs, taken off the argument list before typer sees it.

Every key of the run file is an option this way, without being declared one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ganglion.errors import ConfigError

_KEY = re.compile(r"--([a-z_]+(?:\.[a-z_0-9]+)+)(?:=(.*))?", re.DOTALL)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
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
    return rest, overrides
