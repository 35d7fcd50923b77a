"""The settings of a run that are no part of its plan, grouped by what they concern."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ganglion.decide.schedules.pipeline import BUILT_IN, Registry
from ganglion.decide.topology import ModelCuts
from ganglion.execute.measure import Sample
from ganglion.execute.models import InitialWeights
from ganglion.execute.offload import MIN_BYTES
from ganglion.execute.tensor import TensorSettings
from ganglion.execute.train.averaged import AveragingSettings
from ganglion.execute.update import LrFactor, constant


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """The folder of a file of activations, and the least bytes that are moved."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    min_bytes: int = MIN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a plan is carried out; the defaults suit a model in memory and a built-in schedule.

    Updates: gradients are clipped to `max_grad_norm`, if it is above 0. The rate of update `step`
    is the optimizer's own times `lr_factor(step)`. `error_feedback` corrects updates from late
    gradients (schedule two_bw). `seed` decides dropout and the order of samples.

    Blocks: those on the meta device need `initial` weights, of which every rank makes its own
    piece; others begin as on rank 0. With a `sample`, one microbatch, stages are cut by measured
    times; without, by their weights. `cuts` say how to split a model over tensor axes; known models
    need none, and linear layers of others take and return whole activations. `tensor` are the
    settings of split layers, if not those of the plan.

    Schedule and messages: `schedules` knows the plan's schedule by name. A rank is lost after
    `timeout_s` of silence.

    Averaging and memory: `averaging` says how the workers of a plan with averaging exchange. A plan
    with the tier "disk" keeps optimizer state in a file in `offload_dir`, and `activations` as they
    say. With `keep_freed`, freed host memory stays with the process, which is faster.
    """

    max_grad_norm: float = 0.0
    lr_factor: LrFactor = constant
    error_feedback: bool = False
    seed: int = 0

    initial: InitialWeights | None = None
    sample: Sample | None = None
    cuts: ModelCuts | None = None
    tensor: TensorSettings | None = None

    schedules: Registry = BUILT_IN
    timeout_s: float = 300.0

    averaging: AveragingSettings | None = None
    offload_dir: Path = field(default_factory=Path)
    activations: ActivationSettings | None = None
    keep_freed: bool = True
