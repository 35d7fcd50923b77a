"""The simulator: drives schedules on a virtual clock, as the engine drives them on a real one."""

from ganglion.decide.simulator.defaults import with_default_limit, with_known_costs
from ganglion.decide.simulator.disturbance import Disturbance
from ganglion.decide.simulator.links import Network, Route, Transfer
from ganglion.decide.simulator.on_cluster import PlanSimulation, simulate_plan
from ganglion.decide.simulator.pipeline import Surroundings, simulate
from ganglion.decide.simulator.result import Simulation
from ganglion.decide.simulator.tensor_step import (
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
