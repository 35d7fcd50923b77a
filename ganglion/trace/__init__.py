"""What happened, and when: trace events, step metrics, their files, pictures and figures.

What explains a trace is loaded on first use: who only records one should not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.lazy import lazy_names
from ganglion.trace.event import COMM, COMPUTE, HOST, LANES, Event
from ganglion.trace.grid import render_grid
from ganglion.trace.metrics import MetricsFile, StepMetrics, read_metrics
from ganglion.trace.recorder import Recorder, event_to_json, read_events

if TYPE_CHECKING:
    from ganglion.trace.diff import TraceDiff, diff_traces
    from ganglion.trace.files import read_trace, write_trace
    from ganglion.trace.statistics import TraceStatistics, summarise

__all__ = [
    "COMM",
    "COMPUTE",
    "HOST",
    "LANES",
    "Event",
    "MetricsFile",
    "Recorder",
    "StepMetrics",
    "TraceDiff",
    "TraceStatistics",
    "diff_traces",
    "event_to_json",
    "read_events",
    "read_metrics",
    "read_trace",
    "render_grid",
    "summarise",
    "write_trace",
]

_HOME = {
    "TraceDiff": "diff",
    "TraceStatistics": "statistics",
    "diff_traces": "diff",
    "read_trace": "files",
    "summarise": "statistics",
    "write_trace": "files",
}

__getattr__ = lazy_names(__name__, _HOME)
