"""What happened, and when: trace events, step metrics, their files, pictures and figures."""

from ganglion.trace.critical_path import CriticalPath, critical_path
from ganglion.trace.diff import TraceDiff, diff_traces
from ganglion.trace.event import COMM, COMPUTE, HOST, LANES, Event
from ganglion.trace.files import read_trace, write_trace
from ganglion.trace.grid import render_grid
from ganglion.trace.metrics import MetricsFile, StepMetrics, read_metrics
from ganglion.trace.recorder import Recorder, event_to_json, read_events
from ganglion.trace.statistics import TraceStatistics, summarise

__all__ = [
    "COMM",
    "COMPUTE",
    "HOST",
    "LANES",
    "CriticalPath",
    "Event",
    "MetricsFile",
    "Recorder",
    "StepMetrics",
    "TraceDiff",
    "TraceStatistics",
    "critical_path",
    "diff_traces",
    "event_to_json",
    "read_events",
    "read_metrics",
    "read_trace",
    "render_grid",
    "summarise",
    "write_trace",
]
