"""Cluster files made from measurements: the fit of their numbers, and their text."""

from ganglion.decide.costs.machine.cluster_text import cluster_text
from ganglion.decide.costs.machine.fit import (
    BUCKET,
    BYTE,
    CALL,
    FLOP,
    LATENCY,
    MEMORY_BYTE,
    RING_BYTE,
    STEP,
    Fit,
    FitError,
    Timing,
    compute_from,
    compute_terms,
    fit_times,
    link_from,
    rounded,
)

__all__ = [
    "BUCKET",
    "BYTE",
    "CALL",
    "FLOP",
    "LATENCY",
    "MEMORY_BYTE",
    "RING_BYTE",
    "STEP",
    "Fit",
    "FitError",
    "Timing",
    "cluster_text",
    "compute_from",
    "compute_terms",
    "fit_times",
    "link_from",
    "rounded",
]
