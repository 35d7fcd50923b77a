"""State machines that decide the next action: pipelines, buckets, exchanges, the loss scale.

The engine and the simulator both drive them. They know no clock, no tensors and no messages.
"""

from ganglion.decide.schedules.loss_scale import LossScale

__all__ = ["LossScale"]
