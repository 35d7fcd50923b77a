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
from ganglion.decide.simulator.result import RankUse, Simulation
from ganglion.decide.simulator.steady import PlanFigures, figures_of, simulate_figures, step_s
from ganglion.decide.simulator.tensor_step import (
    TensorOverlap,
    TensorStep,
    tensor_step,
    with_waits,
)

__all__ = [
    "Disturbance",
    "Network",
    "PlanFigures",
    "PlanSimulation",
    "RankUse",
    "Route",
    "Simulation",
    "SimulationOptions",
    "TensorOverlap",
    "TensorStep",
    "Transfer",
    "figures_of",
    "simulate",
    "simulate_figures",
    "simulate_plan",
    "step_s",
    "tensor_step",
    "with_default_limit",
    "with_known_costs",
    "with_waits",
]
