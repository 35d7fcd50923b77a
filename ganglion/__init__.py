"""Ganglion plans, predicts, runs and explains parallel training of PyTorch models.

    import ganglion

    plan = ganglion.Plan(data=2, microbatch_size=4, num_microbatches=2)
    run = ganglion.parallelize(blocks, loss_fn, optimizer_factory, plan)
    for result in run.steps(run.batches(dataset), until=100):
        print(result.step, result.loss)

Importing this package does not import torch: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ganglion.errors import GanglionError
    from ganglion.plan import Plan
    from ganglion.train import Run, StepResult, parallelize

__version__ = "0.1.0"

__all__ = ["GanglionError", "Plan", "Run", "StepResult", "__version__", "parallelize"]

_HOME = {
    "GanglionError": "ganglion.errors",
    "Plan": "ganglion.plan",
    "Run": "ganglion.train",
    "StepResult": "ganglion.train",
    "parallelize": "ganglion.train",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ganglion' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
