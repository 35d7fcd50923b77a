"""What this process may use of its machine."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the cores this process may run on; where that cannot be asked, all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
