"""Records of real and simulated runs: trace events, step metrics, their files, pictures, figures.

It imports no other room, so that both halves can write it. Modules that explain a trace are loaded
on first use, so that recording one does not wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.lazy import lazy_names
from ganglion.trace.event import (
    BACKWARD,
    COMM,
    COMPUTE,
    FORWARD,
    HOST,
    LANES,
    NONE,
    RECEIVES,
    REDUCE,
    SENDS,
    UPDATE,
    WEIGHT,
    Event,
    Recorder,
    event_to_json,
)
from ganglion.trace.metrics import MetricsFile, StepMetrics, read_metrics

if TYPE_CHECKING:
    from ganglion.trace.critical import CriticalPath, critical_path
    from ganglion.trace.diff import KindDiff, PlaceDiff, TraceDiff, diff_traces
    from ganglion.trace.files import check_suffix, read_trace, write_trace
    from ganglion.trace.pictures import render_grid, time_unit
    from ganglion.trace.statistics import (
        Interval,
        LinkStatistics,
        RankStatistics,
        TraceStatistics,
        common,
        match_messages,
        merged,
        summarise,
        total_s,
    )

__all__ = [
    "BACKWARD",
    "COMM",
    "COMPUTE",
    "FORWARD",
    "HOST",
    "LANES",
    "NONE",
    "RECEIVES",
    "REDUCE",
    "SENDS",
    "UPDATE",
    "WEIGHT",
    "CriticalPath",
    "Event",
    "Interval",
    "KindDiff",
    "LinkStatistics",
    "MetricsFile",
    "PlaceDiff",
    "RankStatistics",
    "Recorder",
    "StepMetrics",
    "TraceDiff",
    "TraceStatistics",
    "check_suffix",
    "common",
    "critical_path",
    "diff_traces",
    "event_to_json",
    "match_messages",
    "merged",
    "read_metrics",
    "read_trace",
    "render_grid",
    "summarise",
    "time_unit",
    "total_s",
    "write_trace",
]

_MODULES = {
    "critical": ("CriticalPath", "critical_path"),
    "diff": ("KindDiff", "PlaceDiff", "TraceDiff", "diff_traces"),
    "files": ("check_suffix", "read_trace", "write_trace"),
    "pictures": ("render_grid", "time_unit"),
    "statistics": (
        *("Interval", "LinkStatistics", "RankStatistics", "TraceStatistics"),
        *("common", "match_messages", "merged", "summarise", "total_s"),
    ),
}

__getattr__ = lazy_names(
    __name__, {name: module for module, names in _MODULES.items() for name in names}
)
