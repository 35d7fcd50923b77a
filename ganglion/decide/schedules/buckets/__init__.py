"""Buckets: how gradients, optimizer state and gathered weights are grouped and ordered.

Decided from sizes and events alone: no tensors, no streams.
"""

from ganglion.decide.schedules.buckets.gathers import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    GatherOrder,
    Use,
    kept_within,
)
from ganglion.decide.schedules.buckets.gradients import Bucket, plan_buckets
from ganglion.decide.schedules.buckets.program import (
    NUM_SLOTS,
    READ,
    UPDATE,
    WRITE,
    BucketProgram,
    Move,
)
from ganglion.decide.schedules.buckets.updates import UpdateBucket, cut_update, padded

__all__ = [
    "BACKWARD",
    "FORWARD",
    "NUM_SLOTS",
    "READ",
    "RECOMPUTE",
    "UPDATE",
    "WRITE",
    "Bucket",
    "BucketProgram",
    "GatherOrder",
    "Move",
    "UpdateBucket",
    "Use",
    "cut_update",
    "kept_within",
    "padded",
    "plan_buckets",
]
