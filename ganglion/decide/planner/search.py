"""The search: every layout that divides is estimated, the best are simulated.

    layouts x schedules x storage --(closed form: time, memory)--> a few hundred that may fit
        --(memory model: all bytes of every rank)--> those that fit --(simulation)--> the answer

Recomputation and offload cost time, so a layout gets the first combination that fits.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from ganglion.decide.costs import balanced_boundaries, update_s
from ganglion.decide.plan import Plan
from ganglion.decide.planner.answer import SECONDS_PER_DAY, Answer, PlannedLayout, StepParts
from ganglion.decide.planner.candidates import Layout, Pipelining, layouts, rank_orders, schedules
from ganglion.decide.planner.estimate import Estimate, Estimator, Storage
from ganglion.decide.planner.question import Question
from ganglion.decide.predict import Prediction, predict_layout, predicted_memory
from ganglion.decide.schedules.pipeline import check_planned, planned_stage_map
from ganglion.decide.shapes import blocks_of
from ganglion.errors import ConfigError, LayoutError
from ganglion.units import format_bytes

NUM_CONFIRMED = 10
# Estimates of the first look that are kept, and those of the second that are tried.
_NUM_KEPT = 3000
_NUM_TRIED = 80
# Steps that are simulated; a pipeline that never flushes fills in the first.
_NUM_STEPS = 3
# Variants of one mesh among the confirmed.
_MOST_ALIKE = 4
# An estimate of memory is that far off at most: what needs more is not tried.
_MEMORY_SLACK = 1.2

Check = Callable[[Plan], None]  # raises ConfigError for a plan that cannot run


def search(question: Question, *, num_confirmed: int = NUM_CONFIRMED, check: Check) -> Answer:
    """Return the best layouts by simulation; raise LayoutError if none fits.

    `check` refuses plans that the run file of the question does not allow.
    """
    found = _Found(question)
    best = found.best()
    if not best and not found.num_too_large:
        raise LayoutError(_nothing_divides(question))
    rows: list[PlannedLayout] = []
    alike: Counter[Layout] = Counter()
    refusals: list[ConfigError] = []
    for estimate in best:
        if len(rows) == num_confirmed:
            break
        mesh = estimate.layout._replace(microbatch_size=0, num_microbatches=0)
        if alike[mesh] == _MOST_ALIKE:
            continue
        try:
            plan = _runnable(question, estimate, check, found.boundaries(estimate))
        except ConfigError as error:
            refusals.append(error)
            continue
        if fits(question, plan):
            alike[mesh] += 1
            rows.append(priced(question, plan, estimate.step_s))
    if refusals and len(refusals) == len(best):
        raise refusals[0]
    if not rows and question.fixes_the_mesh:
        # A known layout is priced even where our memory model finds no room for it.
        anyhow = search(
            replace(question, memory_bytes=sys.maxsize), num_confirmed=num_confirmed, check=check
        )
        return replace(anyhow, question=question, num_too_large=anyhow.num_considered)
    if not rows:
        raise LayoutError(_nothing_fits(question, found))
    rows.sort(key=lambda one: (one.step_s, one.memory_bytes))
    return Answer(
        question=question,
        method="full",
        plans=rows,
        num_considered=found.num_considered,
        num_too_large=found.num_too_large,
    )


class _Found:
    """The estimates of a question."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._estimator = Estimator(question)
        self.num_considered = 0
        self.num_too_large = 0
        self.least_bytes = float("inf")

    def best(self) -> list[Estimate]:
        """Return the candidates with the shortest steps, in order."""
        kept: list[tuple[float, int, Estimate]] = []  # a heap, the longest step first
        for layout, precision in product(layouts(self._question), self._question.precisions):
            longest_s = -kept[0][0] if len(kept) == _NUM_KEPT else math.inf
            if self._estimator.least_step_s(layout, precision) > longest_s:
                self.num_considered += 1
                continue
            for estimate in self._variants(layout, precision):
                entry = (-estimate.step_s, -self.num_considered, estimate)
                if len(kept) < _NUM_KEPT:
                    heapq.heappush(kept, entry)
                else:
                    heapq.heappushpop(kept, entry)
        return self._cut([estimate for *_, estimate in sorted(kept, reverse=True)])

    def boundaries(self, estimate: Estimate) -> tuple[int, ...]:
        """Return the cut that makes the longest stage of a candidate shortest."""
        if estimate.layout.pipe == 1:
            return ()
        num_stages = planned_stage_map(planned(self._question, estimate)).num_stages
        costs_s = self._estimator.blocks_s(estimate.layout, estimate.storage, estimate.precision)
        return balanced_boundaries(costs_s, num_stages)

    def _cut(self, estimates: list[Estimate]) -> list[Estimate]:
        """Return the best of the second look, which only makes steps longer."""
        found: list[tuple[float, int, Estimate]] = []  # a heap, the longest step first
        for number, estimate in enumerate(estimates):
            if len(found) == _NUM_TRIED and estimate.step_s > -found[0][0]:
                break
            cut = estimate._replace(step_s=self._estimator.cut_step_s(estimate))
            push = heapq.heappush if len(found) < _NUM_TRIED else heapq.heappushpop
            push(found, (-cut.step_s, -number, cut))
        return [estimate for *_, estimate in sorted(found, reverse=True)]

    def _variants(self, layout: Layout, precision: str) -> Iterator[Estimate]:
        """Yield a layout with each schedule, in the better rank order."""
        orders = rank_orders(self._question, layout)
        if len(orders) > 1:
            cost_s = [self._estimator.network_s(layout, order, precision) for order in orders]
            orders = [orders[cost_s.index(min(cost_s))]]
        for schedule, chunks in schedules(self._question, layout):
            if not too_stale(self._question, schedule, layout.pipe):
                self.num_considered += 1
                found = list(
                    self._stored(layout, Pipelining(schedule, chunks, orders[0]), precision)
                )
                self.num_too_large += not found
                yield from found

    def _stored(self, layout: Layout, pipelining: Pipelining, precision: str) -> Iterator[Estimate]:
        """Yield the candidate with the first storage that surely fits, and those that may."""
        budget = self._question.memory_bytes
        for storage in _storages(self._question):
            args = (layout, pipelining, storage, precision)
            num_bytes = self._estimator.memory_bytes(*args)
            self.least_bytes = min(self.least_bytes, num_bytes)
            if num_bytes <= budget * _MEMORY_SLACK:
                yield Estimate(self._estimator.step_s(*args), num_bytes, *args)
            if num_bytes <= budget / _MEMORY_SLACK:
                return


def staleness_of(schedule: str, pipe: int) -> int:
    """Return how many updates the gradients of a schedule are late."""
    return {"two_bw": 1, "stash": pipe - 1}.get(schedule, 0) if pipe > 1 else 0


def too_stale(question: Question, schedule: str, pipe: int) -> bool:
    """Return whether gradients of a schedule are later than the question allows."""
    most = question.max_staleness
    return most is not None and staleness_of(schedule, pipe) > most


def _storages(question: Question) -> Iterator[Storage]:
    """Yield what may be done for memory, in the order of its cost in time."""
    tiers = [tier for tier in ("host", "disk") if tier in question.cluster.tiers][:1]
    for offload in question.allowed("offload", "none", *tiers):
        for recompute in question.allowed("recompute", "none", "full", "sqrt"):
            # Segments of one block, or of two: attention and MLP of a layer.
            lengths = (0, 2) if recompute == "full" else (0,)
            for every in question.allowed("recompute_every", *lengths):
                yield Storage(str(recompute), int(str(every)), str(offload))


def _runnable(
    question: Question, estimate: Estimate, check: Check, boundaries: tuple[int, ...]
) -> Plan:
    """Return a candidate as a plan; raise ConfigError if it cannot run."""
    plan = planned(question, estimate)
    if not plan.stage_boundaries:
        plan = replace(plan, stage_boundaries=boundaries)
    plan.require_built()
    check_planned(plan)
    check(plan)
    return plan


def fits(question: Question, plan: Plan) -> bool:
    """Return whether every rank has room for what it holds."""
    held = predicted_memory(question.shape, plan, question.rules)
    return max(memory.total for memory in held) <= question.memory_bytes


def planned(question: Question, estimate: Estimate) -> Plan:
    """Return a candidate as a plan, with all fields that the question fixes."""
    layout, pipelining = estimate.layout, estimate.pipelining
    others = {
        name: values[0]
        for name, values in question.fixed.items()
        if name not in _SEARCHED and len(values) == 1
    }
    return Plan(
        **layout._asdict(),
        **pipelining._asdict(),
        **estimate.storage._asdict(),
        precision=estimate.precision,
        **others,  # type: ignore[arg-type]
    )


_SEARCHED = {*Layout._fields, *Pipelining._fields, *Storage._fields, "precision"}


def priced(question: Question, plan: Plan, estimated_s: float | None = None) -> PlannedLayout:
    """Return a plan with its simulated costs, whether it fits or not."""
    prediction = predict_layout(
        question.shape, plan, question.cluster, rules=question.rules, num_steps=_NUM_STEPS
    )
    assert prediction.memory is not None, "the shape of the model is known"
    assert prediction.peak_share is not None, "the speed of the devices is known"
    samples_per_s = plan.global_batch_size / prediction.step_s
    return PlannedLayout(
        plan=prediction.plan,
        step_s=prediction.step_s,
        estimated_s=estimated_s,
        peak_share=prediction.peak_share,
        memory_bytes=prediction.memory.worst.total_bytes,
        bubble=prediction.idle_share,
        exposed_s=prediction.exposed_s,
        staleness=staleness_of(plan.schedule, plan.pipe),
        tokens_per_day=samples_per_s * question.sample_tokens * SECONDS_PER_DAY,
        parts=step_parts(question, prediction),
    )


def step_parts(question: Question, prediction: Prediction) -> StepParts:
    """Return where the time of a step goes, on the pipeline rank that computes longest."""
    step, plan, cluster = prediction.step, prediction.plan, question.cluster
    slots_s = [a + b for a, b in zip(step.forward_s, step.backward_s, strict=True)]
    rank = slots_s.index(max(slots_s))
    layers_s = plan.num_microbatches * step.collective_s[rank]
    computing_s = plan.num_microbatches * slots_s[rank] - layers_s
    blocks = blocks_of(question.shape, plan.global_batch_size)
    peak = cluster.require_compute().peak_flops(plan.computes_in) * plan.mesh().num_ranks
    peak_s = sum(block.total_flops for block in blocks) / peak
    # Forward, backward twice as long, and forward again.
    again_s = computing_s / 4 if plan.recompute != "none" else 0.0
    held = sum(block.num_parameters for block in blocks) / (plan.pipe * plan.x * plan.y * plan.z)
    rest_s = max(0.0, prediction.step_s - computing_s - layers_s)
    updating_s = min(update_s(held, plan, cluster), rest_s)
    exposed_s = min(step.exposed_comm_s[rank] / _NUM_STEPS, rest_s - updating_s)
    return StepParts(
        peak_s=peak_s,
        slower_s=prediction.step_s - peak_s - again_s - layers_s - rest_s,
        again_s=again_s,
        layers_s=layers_s,
        exposed_s=exposed_s,
        update_s=updating_s,
        idle_s=rest_s - updating_s - exposed_s,
    )


# --- refusals ------------------------------------------------------------------------------------


def _nothing_divides(question: Question) -> str:
    return (
        f"no layout of --gpus {question.num_ranks} divides {question.name} and --batch "
        f"{question.global_batch_size}"
        + (f" with --fix {', '.join(sorted(question.fixed))}" if question.fixed else "")
        + ": choose a batch that is a multiple of more powers of two, or fix less"
    )


def _nothing_fits(question: Question, found: _Found) -> str:
    """Say how much is missing, and how many ranks would do."""
    need = format_bytes(round(found.least_bytes))
    text = (
        f"no layout of {question.name} fits {question.num_ranks} ranks of "
        f"{format_bytes(question.memory_bytes)}: the smallest needs about {need} on a rank"
    )
    more = _enough_ranks(question)
    if more is not None:
        return f"{text}; --gpus {more} would fit"
    return f"{text}; use a cluster with more memory a rank, or a smaller model"


def _enough_ranks(question: Question) -> int | None:
    """Return a number of ranks, twice as many each time, with which an estimate fits."""
    node, most = question.cluster.ranks_per_node, question.cluster.num_nodes
    num_ranks = question.num_ranks
    for _ in range(10):
        num_ranks *= 2
        if (most is not None and num_ranks > most * node) or question.fixed:
            return None
        found = _Found(replace(question, num_ranks=num_ranks))
        if any(one.memory_bytes * _MEMORY_SLACK <= question.memory_bytes for one in found.best()):
            return num_ranks
    return None
