"""The simulator: drives schedules on a virtual clock, as the engine drives them on a real one.

It gets times and links from `costs` and returns traces and figures; it neither predicts costs nor
chooses plans.
"""

from ganglion.decide.simulator.on_cluster import (
    PlanSimulation,
    simulate_plan,
    with_default_limit,
    with_known_costs,
)
from ganglion.decide.simulator.options import (
    Disturbance,
    Network,
    Route,
    SimulationOptions,
    Transfer,
)
from ganglion.decide.simulator.pipeline import simulate
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
    "SimulationOptions",
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
