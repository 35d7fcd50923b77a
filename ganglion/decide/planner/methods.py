"""The published planners by name, so that their choices can be compared with ours.

axonn           AxoNN-4D (2502.08145, section V-B): every grid x, y, z, data without a pipeline, in
                the order of the communication model alone: no compute, no overlap, no latency
pipedream_2bw   PipeDream-2BW (2006.09503, algorithm 1): width times depth, the microbatch and
                recomputation with the best throughput of its closed form, under 2BW alone

Both rank by their own formulas, `score_s`, and decide by their own rules what fits; times and bytes
beside them are those of our simulation and memory model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ganglion.decide.costs import Cluster, axonn_times, two_bw_step_s
from ganglion.decide.plan import Plan
from ganglion.decide.planner.answer import Answer, PlannedLayout
from ganglion.decide.planner.candidates import Layout, Pipelining, layouts
from ganglion.decide.planner.estimate import Estimate, Storage
from ganglion.decide.planner.question import Question
from ganglion.decide.planner.search import (
    NUM_CONFIRMED,
    Check,
    planned,
    priced,
    search,
    too_stale,
)
from ganglion.decide.schedules.pipeline import check_planned
from ganglion.decide.shapes import Layout as TensorLayout
from ganglion.decide.shapes import activations_of, blocks_of
from ganglion.decide.topology import DEFAULT_RANK_ORDER, Mesh
from ganglion.errors import ConfigError, LayoutError

# Of a parameter: fp16 weight and gradient, fp32 master, gradient and two moments (A.6 of the
# spec). It gives the least tensor parallelism that AxoNN-4D's authors used for each model (B.3).
_STATE_BYTES = 20
# With a second fp32 master, as the engine of PipeDream-2BW was released (spec A.9).
_TWO_MASTERS_BYTES = 24
# Of 16 GiB, 14.2 GB were left to a model (spec A.9, figure 9 of the paper).
_USABLE = 14.2e9 / 2**34

Method = Callable[[Question, int, Check], Answer]


def _full(question: Question, top: int, check: Check) -> Answer:
    # The closed form does not know which of the best is the very best.
    found = search(question, num_confirmed=max(top, NUM_CONFIRMED), check=check)
    return replace(found, plans=found.plans[:top])


def _axonn(question: Question, top: int, check: Check) -> Answer:
    """Return the grids in the order of the communication model, if their state alone fits."""
    alone = replace(question, fixed={"pipe": (1,), **question.fixed})
    grids: dict[tuple[int, ...], Layout] = {}
    for layout in layouts(alone):
        known = grids.setdefault(layout[:5], layout)
        if layout.microbatch_size > known.microbatch_size:
            grids[layout[:5]] = layout
    scored = []
    for layout in grids.values():
        held = _num_parameters(question) / (layout.x * layout.y * layout.z)
        if held * _STATE_BYTES <= question.memory_bytes:
            plan = _planned(question, layout, "one_f_one_b", "full")
            scored.append((axonn_times(question.shape, plan, question.cluster).total_s, plan))
    return _answer(question, "axonn", scored, top, check, len(grids))


def _pipedream_2bw(question: Question, top: int, check: Check) -> Answer:
    """Return the best of each width and depth, in the order of the closed form's throughput."""
    best: dict[tuple[int, int], tuple[float, Plan]] = {}
    count, cluster = 0, _without_sharing(question.cluster)
    tensor = dict.fromkeys(("x", "y", "z"), (1,))
    for layout in layouts(replace(question, fixed={**tensor, **question.fixed})):
        # m = d g microbatches, so that versions are not made faster than they are used up.
        if layout.pipe == 1 or layout.num_microbatches % layout.pipe:
            continue
        for recompute in question.allowed("recompute", "none", "full"):
            count += 1
            plan = _planned(question, layout, "two_bw", str(recompute))
            if _memory_of_2bw(question, plan) > question.memory_bytes * _USABLE:
                continue
            found = two_bw_step_s(question.shape, plan, cluster), plan
            key = (plan.data, plan.pipe)
            if key not in best or found[0] < best[key][0]:
                best[key] = found
    return _answer(question, "pipedream_2bw", list(best.values()), top, check, count)


def _without_sharing(cluster: Cluster) -> Cluster:
    """Return the cluster as the closed form sees it: each rank has a server's whole bandwidth."""
    if cluster.inter is None:
        return cluster
    return replace(cluster, inter=replace(cluster.inter, shared=False))


def _memory_of_2bw(question: Question, plan: Plan) -> float:
    """Return the memory of the first stage by the paper's rule (appendix A.1.2; spec A.9).

    The released engine keeps 24 bytes a parameter, and inputs of all microbatches in flight.
    """
    counts = [block.num_parameters for block in blocks_of(question.shape, 1)]
    held = (sum(counts) - counts[0] - counts[-1]) / plan.pipe + counts[0]
    layout = TensorLayout(
        microbatch_size=plan.microbatch_size, mesh=Mesh(), precision=plan.computes_in
    )
    blocks = activations_of(question.shape, layout)
    kept = sum(block.saved_bytes for block in blocks) / plan.pipe
    inputs = sum(block.input_bytes for block in blocks) / plan.pipe
    alive = plan.pipe * (kept if plan.recompute == "none" else inputs)
    again = 0.0 if plan.recompute == "none" else max(block.saved_bytes for block in blocks)
    return _TWO_MASTERS_BYTES * held + alive + again


def _num_parameters(question: Question) -> int:
    return sum(block.num_parameters for block in blocks_of(question.shape, 1))


def _planned(question: Question, layout: Layout, schedule: str, recompute: str) -> Plan:
    order = question.allowed("rank_order", DEFAULT_RANK_ORDER)[0]
    storage = Storage(
        str(question.allowed("recompute", recompute)[0]) if schedule != "two_bw" else recompute,
        0,
        str(question.allowed("offload", "none")[0]),
    )
    pipelining = Pipelining(schedule, 0, order)  # type: ignore[arg-type]
    return planned(
        question,
        Estimate(0.0, 0.0, layout, pipelining, storage, question.precisions[0]),
    )


def _answer(
    question: Question,
    method: str,
    scored: list[tuple[float, Plan]],
    top: int,
    check: Check,
    num_considered: int,
) -> Answer:
    """Return the plans with the best scores, priced by simulation; memory limits none of them."""
    rows: list[PlannedLayout] = []
    for score_s, plan in sorted(scored, key=lambda pair: pair[0]):
        if too_stale(question, plan.schedule, plan.pipe):
            continue
        with suppress(ConfigError):
            check_planned(plan)
            check(plan)
            rows.append(replace(priced(question, plan), score_s=score_s))
        if len(rows) == top:
            break
    if not rows:
        raise LayoutError(
            f"--method {method} finds no layout of {question.name} that fits "
            f"{question.num_ranks} ranks of {question.cluster.name}: use --method full, more "
            f"ranks, a batch with more factors of two, or no --max-staleness"
        )
    return Answer(
        question=question,
        method=method,
        plans=rows,
        num_considered=num_considered,
        num_too_large=num_considered - len(scored),
    )


METHODS: dict[str, Method] = {
    "full": _full,
    "axonn": _axonn,
    "pipedream_2bw": _pipedream_2bw,
}
