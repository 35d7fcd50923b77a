"""What comes next: the pure rules that the engine and the simulator both follow."""

from ganglion.schedules.buckets import Bucket, plan_buckets
from ganglion.schedules.names import SCHEDULES, canonical_schedule

__all__ = ["SCHEDULES", "Bucket", "canonical_schedule", "plan_buckets"]
