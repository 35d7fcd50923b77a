"""What happened, and when: trace events, step metrics, and the files they live in."""

from ganglion.trace.event import COMM, COMPUTE, HOST, LANES, Event
from ganglion.trace.grid import render_grid
from ganglion.trace.metrics import MetricsFile, StepMetrics, read_metrics
from ganglion.trace.recorder import Recorder, event_to_json, read_events

__all__ = [
    "COMM",
    "COMPUTE",
    "HOST",
    "LANES",
    "Event",
    "MetricsFile",
    "Recorder",
    "StepMetrics",
    "event_to_json",
    "read_events",
    "read_metrics",
    "render_grid",
]
