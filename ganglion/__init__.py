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
    from ganglion.decide.costs import StageTimes
    from ganglion.decide.plan import Plan
    from ganglion.decide.planner import Answer, PlannedLayout, plan
    from ganglion.decide.predict import Prediction, predict
    from ganglion.decide.schedules.pipeline import (
        BUILT_IN,
        ListedSchedule,
        Registry,
        StageMap,
        rehearse,
    )
    from ganglion.decide.shapes import DescribedModel, description_to_json, named_model
    from ganglion.decide.simulator import simulate
    from ganglion.decide.topology import NORMAL, TRANSPOSED, ModelCuts, NormCut, read_launch
    from ganglion.errors import GanglionError
    from ganglion.execute.averaging import ElasticAverage, diloco, local_sgd, slow_momentum
    from ganglion.execute.measure import SampleOutline, describe_model
    from ganglion.execute.models import InitialWeights
    from ganglion.execute.tensor import TensorSettings
    from ganglion.execute.train import (
        ActivationSettings,
        AveragingSettings,
        Run,
        RunSettings,
        StepResult,
        parallelize,
        serve_centers,
    )
    from ganglion.trace import Recorder, render_grid

__version__ = "0.1.0"

# All names that users import: rooms may move, these stay.
__all__ = [
    "BUILT_IN",
    "NORMAL",
    "TRANSPOSED",
    "ActivationSettings",
    "Answer",
    "AveragingSettings",
    "DescribedModel",
    "ElasticAverage",
    "GanglionError",
    "InitialWeights",
    "ListedSchedule",
    "ModelCuts",
    "NormCut",
    "Plan",
    "PlannedLayout",
    "Prediction",
    "Recorder",
    "Registry",
    "Run",
    "RunSettings",
    "SampleOutline",
    "StageMap",
    "StageTimes",
    "StepResult",
    "TensorSettings",
    "__version__",
    "describe_model",
    "description_to_json",
    "diloco",
    "local_sgd",
    "named_model",
    "parallelize",
    "plan",
    "predict",
    "read_launch",
    "rehearse",
    "render_grid",
    "serve_centers",
    "simulate",
    "slow_momentum",
]

_NAMES_OF = {
    "decide.costs": ("StageTimes",),
    "decide.plan": ("Plan",),
    "decide.planner": ("Answer", "PlannedLayout", "plan"),
    "decide.predict": (
        "Prediction",
        "predict",
    ),
    "decide.schedules.pipeline": (
        "BUILT_IN",
        "ListedSchedule",
        "Registry",
        "StageMap",
        "rehearse",
    ),
    "decide.shapes": (
        "DescribedModel",
        "description_to_json",
        "named_model",
    ),
    "decide.simulator": ("simulate",),
    "decide.topology": (
        "NORMAL",
        "TRANSPOSED",
        "ModelCuts",
        "NormCut",
        "read_launch",
    ),
    "errors": ("GanglionError",),
    "execute.averaging": (
        "ElasticAverage",
        "diloco",
        "local_sgd",
        "slow_momentum",
    ),
    "execute.measure": (
        "SampleOutline",
        "describe_model",
    ),
    "execute.models": ("InitialWeights",),
    "execute.tensor": ("TensorSettings",),
    "execute.train": (
        "ActivationSettings",
        "AveragingSettings",
        "Run",
        "RunSettings",
        "StepResult",
        "parallelize",
        "serve_centers",
    ),
    "trace": (
        "Recorder",
        "render_grid",
    ),
}
_HOME = {name: room for room, names in _NAMES_OF.items() for name in names}

__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
