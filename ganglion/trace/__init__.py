"""What happened, and when: trace events, step metrics, their files, pictures and figures.

What explains a trace is loaded on first use: who only records one should not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.lazy import lazy_names
from ganglion.trace.event import COMM, COMPUTE, HOST, LANES, NONE, Event
from ganglion.trace.grid import render_grid
from ganglion.trace.metrics import MetricsFile, StepMetrics, read_metrics
from ganglion.trace.recorder import Recorder, event_to_json, read_events

if TYPE_CHECKING:
    from ganglion.trace.critical import CriticalPath, critical_path
    from ganglion.trace.diff import KindDiff, PlaceDiff, TraceDiff, diff_traces
    from ganglion.trace.files import check_suffix, read_trace, write_trace
    from ganglion.trace.statistics import (
        BACKWARD,
        FORWARD,
        RECEIVES,
        REDUCE,
        SENDS,
        UPDATE,
        WEIGHT,
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
    from ganglion.trace.svg import time_unit

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
    "read_events",
    "read_metrics",
    "read_trace",
    "render_grid",
    "summarise",
    "time_unit",
    "total_s",
    "write_trace",
]

_HOME = {
    "time_unit": "svg",
    "total_s": "statistics",
    "merged": "statistics",
    "match_messages": "statistics",
    "common": "statistics",
    "Interval": "statistics",
    "WEIGHT": "statistics",
    "REDUCE": "statistics",
    "FORWARD": "statistics",
    "BACKWARD": "statistics",
    "UPDATE": "statistics",
    "RankStatistics": "statistics",
    "LinkStatistics": "statistics",
    "SENDS": "statistics",
    "RECEIVES": "statistics",
    "check_suffix": "files",
    "PlaceDiff": "diff",
    "KindDiff": "diff",
    "critical_path": "critical",
    "CriticalPath": "critical",
    "TraceDiff": "diff",
    "TraceStatistics": "statistics",
    "diff_traces": "diff",
    "read_trace": "files",
    "summarise": "statistics",
    "write_trace": "files",
}

__getattr__ = lazy_names(__name__, _HOME)
