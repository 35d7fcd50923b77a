"""A cluster file refined with what a run has shown: one factor on each group of its numbers.

    forward, backward, weights    all rates and times of computation
    gap behind an action          action_s
    update                        update_gbps, update_s
    messages                      latency and bandwidth of the links they took
    reductions                    bucket_gbps, or all collectives where a file does not have it

A run has too few different times to fit every number anew. So what the closed form says is
multiplied by the median of measured / predicted over stages, and the numbers' ratios stay those of
the file. A group with no time in the trace, or less than 2 % off, stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from ganglion.decide.config import RunFile, expected_shape, own_code_key
from ganglion.decide.costs import BYTES_PER_GBIT, Cluster, Compute, Link, StageTimes, rounded
from ganglion.decide.plan import Plan
from ganglion.decide.predict.comparison import (
    awaited_messages,
    choose_window,
    computing,
    figures,
    read_steps,
    summed_reductions,
)
from ganglion.decide.predict.step_time import StepSetting, model_times, predict_figures
from ganglion.decide.schedules.pipeline import planned_stage_map
from ganglion.errors import ConfigError, DataError
from ganglion.trace import BACKWARD, COMPUTE, FORWARD, NONE, UPDATE, WEIGHT, Event

REDUCTIONS = "reductions"
_NEAR = 0.02
_MOST_SIMULATED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A group of numbers that was multiplied, and how many times of the trace said so."""

    group: str
    num_times: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """The refined cluster, what changed, and the step of that run before and after."""

    cluster: Cluster
    changes: Sequence[Change]
    measured_s: float
    before_s: float
    after_s: float

    @property
    def error_before(self) -> float:
        """(predicted - measured) / measured with the file as it was."""
        return self.before_s / self.measured_s - 1

    @property
    def error_after(self) -> float:
        """The same with the refined file."""
        return self.after_s / self.measured_s - 1


def refine(folder: Path, run: RunFile, plan: Plan, cluster: Cluster) -> Refined:
    """Refine a cluster with the newest launch of a run; raise DataError without enough steps."""
    _check(run, plan, cluster)
    first, events = read_steps(folder)
    window = choose_window(events, first)
    used = [event for event in events if event.step > first]
    # The trace of a whole model names no stage.
    used = [e._replace(stage=0) if e.stage == NONE and e.lane == COMPUTE else e for e in used]
    shape = expected_shape(run)

    def times_on(machine: Cluster) -> list[StageTimes]:
        return model_times(shape, plan, machine)

    changes: list[Change] = []
    refined = cluster
    for group, ratios_of, change in _GROUPS:
        ratios = list(ratios_of(used, plan, times_on(refined), refined))
        factor = median(ratios) if ratios else 1.0
        if abs(factor - 1) > _NEAR:
            refined = change(refined, factor)
            if group == REDUCTIONS and plan.pipe == 1:
                # Rings of some ranks of a node obey the rate of messages, of which none was sent.
                refined = _scaled_links(refined, factor)
            changes.append(Change(group=group, num_times=len(ratios), factor=factor))
    places = {rank: plan.mesh().coordinates(rank).pipe for rank in range(plan.mesh().num_ranks)}
    num_steps = min(_MOST_SIMULATED, window.last - window.first + 2)
    before_s, after_s = (
        predict_figures(plan, times_on(one), one, StepSetting(num_steps=num_steps)).step_s
        for one in (cluster, refined)
    )
    return Refined(
        cluster=refined,
        changes=changes,
        measured_s=figures(events, window, places).step_s,
        before_s=before_s,
        after_s=after_s,
    )


def _check(run: RunFile, plan: Plan, cluster: Cluster) -> None:
    key = own_code_key(run)
    if key is not None:
        raise ConfigError(
            f"{key} is code of your own, whose work is not known, so that its times say nothing "
            f"about rates: refine with a run of a built-in model"
        )
    if plan.x * plan.y * plan.z > 1 or plan.averages:
        what = f"x {plan.x}, y {plan.y}, z {plan.z}" if not plan.averages else plan.averaging
        raise ConfigError(
            f"the run has {what}, whose waits for other ranks are inside the times of its stages: "
            f"refine with a run that uses data and pipe alone"
        )
    if cluster.stages is not None:
        raise ConfigError(
            f"{cluster.source} has times by hand in [stages], which no rate can change: refine a "
            f"file with [compute] alone"
        )
    cluster.require_compute()


# --- what the trace says -------------------------------------------------------------------------


def _medians(events: Sequence[Event], kinds: tuple[str, ...]) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if event.kind in kinds:
            found[event.kind, event.stage].append(event.duration_s)
    return {key: median(lengths) for key, lengths in found.items()}


def _compute_ratios(
    events: Sequence[Event], plan: Plan, times: Sequence[StageTimes], cluster: Cluster
) -> Iterator[float]:
    """Yield measured / predicted of a microbatch on each rank of the pipeline."""
    action_s = cluster.require_compute().action_s
    found = _medians(events, (FORWARD, BACKWARD, WEIGHT))
    stage_map = planned_stage_map(plan)
    for place, one in enumerate(times):
        stages = stage_map.stages_of(place)
        mine = {key: s for key, s in found.items() if key[1] in stages}
        if not all((kind, stage) in mine for kind in (FORWARD, BACKWARD) for stage in stages):
            raise DataError(
                f"the trace has no forward and backward of stages {list(stages)} after its first "
                f"step: train more steps with trace.enabled = true"
            )
        yield sum(mine.values()) / (one.slot_s - 2 * action_s)


def _gap_ratios(
    events: Sequence[Event], plan: Plan, times: Sequence[StageTimes], cluster: Cluster
) -> Iterator[float]:
    """Yield the gap between two computations over action_s, where a rank did not have to wait.

    A gap of a full pipeline is the engine's; a rank that waits has longer ones. So the lower
    quartile of the gaps of each rank counts.
    """
    action_s = cluster.require_compute().action_s
    if plan.pipe == 1 or action_s == 0:
        return
    for intervals in computing(events).values():
        gaps = sorted(after[0] - before[1] for before, after in pairwise(intervals))
        if len(gaps) > 3:
            yield gaps[len(gaps) // 4] / action_s


def _update_ratios(
    events: Sequence[Event], plan: Plan, times: Sequence[StageTimes], cluster: Cluster
) -> Iterator[float]:
    found = _medians(events, (UPDATE,))
    stage_map = planned_stage_map(plan)
    for place, one in enumerate(times):
        mine = [found[UPDATE, s] for s in stage_map.stages_of(place) if (UPDATE, s) in found]
        if mine and one.update_s:
            yield sum(mine) / one.update_s


def _message_ratios(
    events: Sequence[Event], plan: Plan, times: Sequence[StageTimes], cluster: Cluster
) -> Iterator[float]:
    latencies = awaited_messages(events)
    stage_map = planned_stage_map(plan)
    for stage, taken_s in latencies.items():
        predicted_s = times[stage_map.rank_of(stage)].latency_s
        # The clocks of ranks may differ by more than a quick message takes.
        if predicted_s and taken_s > 0:
            yield taken_s / predicted_s


def _reduce_ratios(
    events: Sequence[Event], plan: Plan, times: Sequence[StageTimes], cluster: Cluster
) -> Iterator[float]:
    if plan.data == 1:
        return
    for pipe, taken_s in summed_reductions(events, plan, planned_stage_map(plan)).items():
        if times[pipe].reduce_s and taken_s:
            yield taken_s / times[pipe].reduce_s


# --- what changes --------------------------------------------------------------------------------


def scaled_compute(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with every forward and backward `factor` times as long, not updates.

    A share of the peak above 1 says that the peak was too low: it rises.
    """
    old = cluster.require_compute()
    efficiency = old.efficiency / factor
    raised = max(1.0, efficiency)
    memory_gbps = old.memory_bytes_per_s / BYTES_PER_GBIT  # if not given, it follows from the peak
    compute = replace(
        old,
        fp32_tflops=rounded(old.fp32_tflops * raised),
        bf16_tflops=rounded(old.bf16_tflops * raised),
        efficiency=rounded(efficiency / raised),
        memory_bandwidth_gbps=rounded(memory_gbps / factor),
        activation_gbps=old.activation_gbps and rounded(old.activation_gbps / factor),
        update_gbps=rounded(old.update_bytes_per_s / BYTES_PER_GBIT),
        block_s=rounded(old.block_s * factor),
    )
    return replace(cluster, compute=compute)


def _scaled_actions(cluster: Cluster, factor: float) -> Cluster:
    old = cluster.require_compute()
    return replace(cluster, compute=replace(old, action_s=rounded(old.action_s * factor)))


def _scaled_update(cluster: Cluster, factor: float) -> Cluster:
    old: Compute = cluster.require_compute()
    gbps = old.update_bytes_per_s / BYTES_PER_GBIT
    changed = replace(
        old, update_gbps=rounded(gbps / factor), update_s=rounded(old.update_s * factor)
    )
    return replace(cluster, compute=changed)


def _scaled_links(cluster: Cluster, factor: float) -> Cluster:
    def scaled(link: Link) -> Link:
        return replace(
            link,
            latency_s=rounded(link.latency_s * factor),
            bandwidth_gbps=rounded(link.bandwidth_gbps / factor),
            # Collectives are another matter: what they had from the message stays theirs.
            collective_gbps=link.collective_gbps or link.bandwidth_gbps,
            collective_latency_s=link.step_s,
        )

    return _with_links(cluster, scaled)


def scaled_collectives(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with collectives `factor` times as long, but not messages and buckets."""

    def scaled(link: Link) -> Link:
        return replace(
            link,
            collective_gbps=rounded((link.collective_gbps or link.bandwidth_gbps) / factor),
            collective_latency_s=rounded(link.step_s * factor),
            collective_s=rounded(link.collective_s * factor),
        )

    return _with_links(cluster, scaled)


def _scaled_buckets(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with sums of gradients `factor` times as long."""

    def scaled(link: Link) -> Link:
        if link.bucket_gbps is None:
            return link
        return replace(link, bucket_gbps=rounded(link.bucket_gbps / factor))

    if all(link is None or link.bucket_gbps is None for link in (cluster.intra, cluster.inter)):
        return scaled_collectives(cluster, factor)
    return _with_links(cluster, scaled)


def _with_links(cluster: Cluster, scaled: Callable[[Link], Link]) -> Cluster:
    return replace(
        cluster,
        intra=None if cluster.intra is None else scaled(cluster.intra),
        inter=None if cluster.inter is None else scaled(cluster.inter),
    )


_Ratios = Callable[[Sequence[Event], Plan, Sequence[StageTimes], Cluster], Iterator[float]]
_GROUPS: tuple[tuple[str, _Ratios, Callable[[Cluster, float], Cluster]], ...] = (
    ("computation", _compute_ratios, scaled_compute),
    ("engine", _gap_ratios, _scaled_actions),
    ("update", _update_ratios, _scaled_update),
    ("messages", _message_ratios, _scaled_links),
    (REDUCTIONS, _reduce_ratios, _scaled_buckets),
)
