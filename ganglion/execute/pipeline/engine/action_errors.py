"""What actions are called in traces and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ganglion.decide.schedules.pipeline import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE,
    UPDATE,
    WEIGHT,
    Action,
)
from ganglion.errors import CommError, GanglionError, PipelineError
from ganglion.trace import COMPUTE as COMPUTE_LANE
from ganglion.trace import HOST, Recorder

ACTION_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHT: "weight",
    REDUCE: "reduce",
    UPDATE: "update",
}


@contextmanager
def naming_action(action: Action, rank: int) -> Iterator[None]:
    """Let errors inside say which action failed; ranks that cannot talk name themselves."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        raise named(error, action, rank) from error


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


def note_action(
    recorder: Recorder, action: Action, start_s: float, batch: int, version: int
) -> None:
    """Note in the trace that an action, which began at `start_s`, ends now."""
    recorder.add(
        COMPUTE_LANE if action.lane == COMPUTE else HOST,
        ACTION_NAMES[action.kind],
        start_s,
        recorder.clock(),
        step=batch,
        stage=action.stage,
        microbatch=-1 if action.kind == UPDATE else action.index,
        version=version,
    )
