"""The simulator: drives schedules on a virtual clock, as the engine drives them on a real one."""

from ganglion.simulator.pipeline import Simulation, simulate

__all__ = ["Simulation", "simulate"]
