"""The time of a step: a plan simulated on a cluster.

Times of stages come from the [stages] of the cluster file, or else from the costs of a built-in
model's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean

from ganglion.decide.config import AveragingSection, RunFile, expected_shape, own_code_key
from ganglion.decide.costs import (
    Cluster,
    StageTimes,
    computed_again,
    held_blocks,
    layer_times,
    model_work,
    slowest_ring,
    stage_times,
    stage_times_from_file,
    with_blocking_messages,
)
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import planned_schedule, planned_stage_map
from ganglion.decide.shapes import ModelShape
from ganglion.decide.simulator import (
    Disturbance,
    PlanFigures,
    TensorOverlap,
    TensorStep,
    figures_of,
    simulate_figures,
    simulate_plan,
    tensor_step,
    with_waits,
)
from ganglion.decide.simulator import step_s as simulated_step_s
from ganglion.decide.simulator.averaging import (
    AveragingFigures,
    average_plan,
    without_sums,
    worker_disturbances,
)
from ganglion.decide.topology import TENSOR_AXES
from ganglion.errors import ConfigError
from ganglion.trace import Event
from ganglion.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The time of a step of a plan on a cluster.

    `step_s` is the mean time from one step's end to the next, the first step left out if there are
    more: a pipeline that never flushes fills only once. Lists have one entry for each pipe rank.
    `collective_s` is the part of forward and backward that waits for collectives inside layers.
    `exposed_s` is the time of a step in which a rank waits for communication and computes nothing,
    in the mean of the pipe ranks: for messages, reductions and collectives inside layers.
    `pipeline_s` is the part of a step before the longest reduction and update, if a pipeline
    flushes; of one that never does, it is the whole step.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    limit: int | None
    step_s: float
    makespan_s: float
    bubble: float
    bubbles: list[float]
    exposed_comm_s: list[float]
    peak_live: list[int]
    versions: int
    forward_s: list[float]
    backward_s: list[float]
    message_bytes: list[int]
    reduce_s: list[float]
    collective_s: list[float]
    exposed_s: float
    update_s: list[float]
    pipeline_s: float
    averaging: AveragingFigures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """How a plan is simulated: steps, troubles, the seed of the jitter, and [averaging]."""

    num_steps: int = 3
    disturbances: tuple[Disturbance, ...] = ()
    seed: int = 0
    averaging: AveragingSection = field(default_factory=AveragingSection)


def planned_times(
    plan: Plan, cluster: Cluster, run: RunFile | None, source: str
) -> list[StageTimes]:
    """Return the times of every pipe coordinate; `source` is the file that errors name.

    Without a run the cluster must have [stages]: a plan does not know the size of the model.
    """
    if cluster.stages is not None:
        return file_times(plan, cluster)
    if run is None:
        raise ConfigError(
            f"{source} is a plan, which does not say how large the model is: give the run file "
            f"instead, or write the times as [stages] into {cluster.source}"
        )
    key = own_code_key(run)
    if key is not None:
        raise ConfigError(
            f"{source}: {key} is code of your own, whose cost cannot be known before it runs: "
            f"describe it with `ganglion describe` and set model.description, or write its times "
            f"as [stages] into the cluster file"
        )
    return model_times(expected_shape(run), plan, cluster)


def file_times(plan: Plan, cluster: Cluster) -> list[StageTimes]:
    """Return the times of every pipe coordinate from [stages] of the cluster file."""
    times = stage_times_from_file(cluster, plan.pipe, plan)
    if cluster.runtime.overlaps_messages:
        return times
    return with_blocking_messages(times, planned_stage_map(plan).num_chunks)


def model_times(
    shape: ModelShape, plan: Plan, cluster: Cluster, overlap: TensorOverlap | None = None
) -> list[StageTimes]:
    """Return the times of every pipe coordinate from the costs of a model's blocks.

    What layers wait for where x, y or z split them is a part of these times. `overlap` takes the
    place of what the plan says of it.
    """
    stage_map = planned_stage_map(plan)
    held = [stage_map.stages_of(rank) for rank in range(plan.pipe)]
    blocks = model_work(shape, plan)
    times = stage_times(blocks, plan, cluster, held)
    if not cluster.runtime.overlaps_messages:
        times = with_blocking_messages(times, stage_map.num_chunks)
    if plan.x * plan.y * plan.z == 1:
        return times
    overlap = overlap or planned_overlap(plan, cluster)
    again = computed_again(plan, len(blocks))
    found: dict[object, TensorStep] = {}  # stages of blocks alike wait alike
    waiting = []
    for pipe, (one, mine) in enumerate(zip(times, held_blocks(blocks, plan, held), strict=True)):
        recomputed = frozenset(place for place, number in enumerate(mine) if number in again)
        rings = tuple(slowest_ring(plan.mesh(), axis, cluster, pipe) for axis in TENSOR_AXES)
        key = (tuple(id(blocks[number]) for number in mine), recomputed, rings)
        if key not in found:
            layers = layer_times([blocks[number] for number in mine], plan, cluster, pipe)
            found[key] = tensor_step(layers, plan.num_microbatches, overlap, recomputed=recomputed)
        waiting.append(with_waits(one, found[key]))
    return waiting


def planned_overlap(plan: Plan, cluster: Cluster) -> TensorOverlap:
    """Return which collectives of split layers a plan overlaps, and which weights it keeps."""
    overlaps = plan.overlap and cluster.runtime.overlaps_collectives
    return TensorOverlap(
        all_reduce=overlaps,
        reduce_scatter=overlaps,
        all_gather=overlaps,
        keep_gathered=plan.keep_gathered,
        keep_bytes=int(plan.keep_gathered_mib * MIB),
        late_sums=plan.pipe > 1,
    )


def predict_step(
    plan: Plan, times: Sequence[StageTimes], cluster: Cluster, setting: StepSetting
) -> tuple[StepFigures, list[Event]]:
    """Return the figures of a simulated plan, and its trace; under averaging, that of a worker."""
    result = simulate_plan(
        plan,
        without_sums(times) if plan.averages else times,
        cluster,
        num_steps=setting.num_steps,
        disturbances=setting.disturbances,
        seed=setting.seed,
    )
    figures = _completed(figures_of(result), plan, times, cluster, setting)
    return figures, result.simulation.events(result.global_rank)


def predict_figures(
    plan: Plan, times: Sequence[StageTimes], cluster: Cluster, setting: StepSetting
) -> StepFigures:
    """Return the same figures sooner, without a trace: of many microbatches few are simulated."""
    found = _simulated(plan, times, cluster, setting, setting.disturbances)
    return _completed(found, plan, times, cluster, setting)


def _simulated(
    plan: Plan,
    times: Sequence[StageTimes],
    cluster: Cluster,
    setting: StepSetting,
    disturbances: tuple[Disturbance, ...],
) -> PlanFigures:
    return simulate_figures(
        plan,
        without_sums(times) if plan.averages else times,
        cluster,
        num_steps=setting.num_steps,
        disturbances=disturbances,
        seed=setting.seed,
    )


def _completed(
    found: PlanFigures,
    plan: Plan,
    times: Sequence[StageTimes],
    cluster: Cluster,
    setting: StepSetting,
) -> StepFigures:
    """Return the figures of a plan, with averaging if it averages."""
    figures = _figures(found, plan, times, cluster, setting.num_steps)
    return _averaged(figures, plan, times, cluster, setting) if plan.averages else figures


def _averaged(
    figures: StepFigures,
    plan: Plan,
    times: Sequence[StageTimes],
    cluster: Cluster,
    setting: StepSetting,
) -> StepFigures:
    """Return the figures of all workers, given those of one alone."""

    @cache
    def step_s(worker: int, disturbed: tuple[Disturbance, ...]) -> float:
        if not disturbed:  # one stands for all
            return _simulated(plan, times, cluster, setting, ()).step_s
        alone = simulate_plan(
            plan,
            without_sums(times),
            cluster,
            num_steps=setting.num_steps,
            disturbances=disturbed,
            seed=setting.seed,
        )
        return simulated_step_s(alone, worker)

    found = average_plan(
        plan,
        times,
        cluster,
        step_s(0, ()) if setting.disturbances else figures.step_s,
        tau=setting.averaging.tau,
        overlap=setting.averaging.overlap,
        seed=setting.seed,
        disturbances=worker_disturbances(setting.disturbances, plan.pipe, step_s),
    )
    none = [0.0] * len(figures.reduce_s)
    return replace(figures, step_s=found.step_s, averaging=found, reduce_s=none)


def _figures(
    found: PlanFigures, plan: Plan, times: Sequence[StageTimes], cluster: Cluster, num_steps: int
) -> StepFigures:
    waits_s = [one.waits_s for one in found.uses]
    return StepFigures(
        schedule=plan.schedule,
        num_ranks=plan.num_ranks,
        num_microbatches=plan.num_microbatches,
        limit=found.limit,
        step_s=found.step_s,
        makespan_s=found.makespan_s,
        bubble=found.bubble,
        bubbles=found.bubbles,
        exposed_comm_s=waits_s,
        peak_live=found.peak_live,
        versions=found.versions,
        forward_s=[stage.forward_s for stage in times],
        backward_s=[stage.backward_s + stage.weight_s for stage in times],
        message_bytes=[stage.message_bytes for stage in times],
        reduce_s=[stage.reduce_s for stage in times],
        collective_s=[stage.collective_s for stage in times],
        update_s=[stage.update_s for stage in times],
        pipeline_s=_pipeline_s(found.step_s, plan, times),
        exposed_s=fmean(
            wait_s / num_steps + _inside_s(plan, stage, cluster)
            for wait_s, stage in zip(waits_s, times, strict=True)
        ),
    )


def _pipeline_s(step_s: float, plan: Plan, times: Sequence[StageTimes]) -> float:
    """Return the time of forwards and backwards; of a pipeline that never flushes, of all."""
    if not planned_schedule(plan, 0).flushes:
        return step_s
    return step_s - max(stage.reduce_s + stage.update_s for stage in times)


def _inside_s(plan: Plan, stage: StageTimes, cluster: Cluster) -> float:
    """Return what a stage waits for in a step while the simulator takes it to compute or update."""
    reduce_s = 0.0 if cluster.runtime.overlaps_reduction else stage.reduce_s
    return plan.num_microbatches * stage.collective_s + stage.late_sums_s + reduce_s
