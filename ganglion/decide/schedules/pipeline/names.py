"""The names of the pipeline schedules, and the aliases people type."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from ganglion.errors import ConfigError

SCHEDULES: dict[str, tuple[str, ...]] = {
    "gpipe": (),
    "one_f_one_b": ("1f1b", "pipedream_flush"),
    "interleaved": ("interleaved_1f1b",),
    "zero_bubble": ("zb", "zbh1", "zb_h1"),
    "zero_bubble_v": ("zbv", "zb_v"),
    "message_driven": ("axonn",),
    "two_bw": ("2bw", "pipedream_2bw"),
    "stash": ("pipedream",),
}


def is_reference(name: str) -> bool:
    """Say whether a schedule is named as "package.module:name": the user's own code."""
    return ":" in name


def canonical_schedule(
    name: str,
    key: str = "parallel.schedule",
    known: Mapping[str, Sequence[str]] = SCHEDULES,
) -> str:
    """Return the one name of a schedule; `key` names the user's setting in the error.

    `known` has the aliases of every name. A reference to the user's own code is its own name.
    """
    if is_reference(name):
        return name
    wanted = name.lower().replace("-", "_")
    for schedule, aliases in known.items():
        if wanted == schedule or wanted in aliases:
            return schedule
    every = [*known, *(alias for aliases in known.values() for alias in aliases)]
    near = difflib.get_close_matches(wanted, every, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {list(known)}"
    raise ConfigError(f"{key} = {name!r} is not a schedule; {hint}")
