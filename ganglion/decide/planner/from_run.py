"""A finished run as the planner sees it: its layout, and how long its steps really took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ganglion.decide.config import (
    METRICS_FILE,
    PLAN_FILE,
    RUN_FILE,
    RunFile,
    expected_shape,
    load_run_file,
    read_toml,
)
from ganglion.decide.costs import Cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import (
    Change,
    Refined,
    predict_layout,
    scaled_compute,
    state_rules,
)
from ganglion.errors import ConfigError, DataError
from ganglion.trace import read_metrics

# The first steps warm caches up, and make the memory that later ones find.
_NUM_WARM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The run file and plan of a folder, and the median time of its steps."""

    run: RunFile
    plan: Plan
    step_s: float
    num_steps: int


def read_measured(folder: Path) -> MeasuredRun:
    """Return the run of a folder; raise DataError if it has too few steps."""
    if not (folder / RUN_FILE).exists() or not (folder / PLAN_FILE).exists():
        raise ConfigError(
            f"{folder} holds no run: it needs {RUN_FILE} and {PLAN_FILE}; check the path"
        )
    run = load_run_file(read_toml(folder / RUN_FILE), source=str(folder / RUN_FILE))
    plan = Plan.from_json((folder / PLAN_FILE).read_text("utf-8"), str(folder / PLAN_FILE))
    found = read_metrics(folder / METRICS_FILE) if (folder / METRICS_FILE).exists() else []
    steps_s = [one.step_s for one in found[_NUM_WARM:]]
    if not steps_s:
        raise DataError(
            f"{folder} has {len(found)} finished steps: the first {_NUM_WARM} do not count, so "
            f"train for {_NUM_WARM + 1} or more"
        )
    return MeasuredRun(run=run, plan=plan, step_s=median(steps_s), num_steps=len(steps_s))


def refined_as_a_whole(found: MeasuredRun, cluster: Cluster) -> Refined:
    """Return a cluster whose computations are slower or faster as the steps of a run were."""
    shape, rules = expected_shape(found.run), state_rules(found.run)

    def predicted_s(machine: Cluster) -> float:
        return predict_layout(shape, found.plan, machine, rules=rules).step_s

    before_s = predicted_s(cluster)
    factor = found.step_s / before_s
    scaled = scaled_compute(cluster, factor)
    return Refined(
        cluster=scaled,
        changes=[Change(group="steps", num_times=found.num_steps, factor=factor)],
        measured_s=found.step_s,
        before_s=before_s,
        after_s=predicted_s(scaled),
    )
