"""Gradients of replicas: flat buckets, reduced while backward runs, and their global norm.

Knows parameters and groups only; optimizers and pipelines use it.
"""

from ganglion.execute.gradients.buckets import (
    GradientBuckets,
    Reach,
    clip_factor,
    global_norm,
    sum_of_squares,
)
from ganglion.execute.gradients.reducer import GradientReducer

__all__ = [
    "GradientBuckets",
    "GradientReducer",
    "Reach",
    "clip_factor",
    "global_norm",
    "sum_of_squares",
]
