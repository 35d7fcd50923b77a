"""Commands about machines: measure this one, refine what is known of it, list the built-in ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.lazy import lazy_names

if TYPE_CHECKING:
    from ganglion.cli.machines.clusters import clusters_command
    from ganglion.cli.machines.profile import (
        ProfileRequest,
        measured_of,
        profile_command,
        run_ranks,
    )
    from ganglion.cli.machines.refine import refine_command

__all__ = [
    "ProfileRequest",
    "clusters_command",
    "measured_of",
    "profile_command",
    "refine_command",
    "run_ranks",
]

_HOME = {
    "ProfileRequest": "profile",
    "clusters_command": "clusters",
    "measured_of": "profile",
    "profile_command": "profile",
    "refine_command": "refine",
    "run_ranks": "profile",
}

__getattr__ = lazy_names(__name__, _HOME)
