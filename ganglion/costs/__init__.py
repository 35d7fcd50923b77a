"""What things cost: times of stages and links."""

from ganglion.costs.times import StageTimes

__all__ = ["StageTimes"]
