"""The names of the pipeline schedules, and the aliases people type."""

from __future__ import annotations

import difflib

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


def canonical_schedule(name: str, key: str = "parallel.schedule") -> str:
    """Return the one name of a schedule; `key` names the user's setting in the error."""
    wanted = name.lower().replace("-", "_")
    for schedule, aliases in SCHEDULES.items():
        if wanted == schedule or wanted in aliases:
            return schedule
    known = [*SCHEDULES, *(alias for aliases in SCHEDULES.values() for alias in aliases)]
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {list(SCHEDULES)}"
    raise ConfigError(f"{key} = {name!r} is not a schedule; {hint}")
