"""Ganglion plans, predicts, runs and explains parallel training of PyTorch models.

    import ganglion

    plan = ganglion.Plan(data=2, microbatch_size=4, num_microbatches=2)
    run = ganglion.parallelize(blocks, loss_fn, optimizer_factory, plan)
    for result in run.steps(run.batches(dataset), until=100):
        print(result.step, result.loss)

Importing this package does not import torch: names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.lazy import lazy_names

if TYPE_CHECKING:
    from ganglion.decide.plan import Plan
    from ganglion.decide.predict import Prediction, predict
    from ganglion.errors import GanglionError
    from ganglion.execute.train import Run, RunSettings, StepResult, parallelize

__version__ = "0.1.0"

__all__ = [
    "GanglionError",
    "Plan",
    "Prediction",
    "Run",
    "RunSettings",
    "StepResult",
    "__version__",
    "parallelize",
    "predict",
]

_HOME = {
    "GanglionError": "errors",
    "Plan": "decide.plan",
    "Prediction": "decide.predict",
    "Run": "execute.train",
    "RunSettings": "execute.train",
    "StepResult": "execute.train",
    "parallelize": "execute.train",
    "predict": "decide.predict",
}

__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
