"""What comes next: pure state machines that the engine and the simulator both drive."""

from ganglion.decide.schedules.loss_scale import LossScale

__all__ = ["LossScale"]
