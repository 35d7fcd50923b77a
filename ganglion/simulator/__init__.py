"""The simulator: drives schedules on a virtual clock, as the engine drives them on a real one."""

from ganglion.simulator.defaults import with_default_limit, with_known_costs
from ganglion.simulator.disturbance import Disturbance
from ganglion.simulator.links import Network, Route, Transfer
from ganglion.simulator.on_cluster import PlanSimulation, simulate_plan
from ganglion.simulator.pipeline import Surroundings, simulate
from ganglion.simulator.result import Simulation
from ganglion.simulator.tensor_step import (
    TensorOverlap,
    TensorStep,
    tensor_step,
    with_collectives,
)

__all__ = [
    "Disturbance",
    "Network",
    "PlanSimulation",
    "Route",
    "Simulation",
    "Surroundings",
    "TensorOverlap",
    "TensorStep",
    "Transfer",
    "simulate",
    "simulate_plan",
    "tensor_step",
    "with_collectives",
    "with_default_limit",
    "with_known_costs",
]
