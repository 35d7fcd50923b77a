"""What actions are called in traces and errors."""

from __future__ import annotations

from ganglion.errors import GanglionError, PipelineError
from ganglion.schedules.action import BACKWARD, FORWARD, REDUCE, UPDATE, WEIGHT, Action

ACTION_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHT: "weight",
    REDUCE: "reduce",
    UPDATE: "update",
}


def named(error: Exception, action: Action, rank: int) -> GanglionError:
    """Return an error that adds rank, stage, action and microbatch to what went wrong."""
    what = "batch" if action.kind in (REDUCE, UPDATE) else "microbatch"
    where = (
        f"{ACTION_NAMES[action.kind]} of stage {action.stage}, {what} {action.index} failed on "
        f"rank {rank}"
    )
    if isinstance(error, GanglionError):
        return type(error)(f"{where}: {error}")
    return PipelineError(f"{where}: {type(error).__name__}: {error}")
