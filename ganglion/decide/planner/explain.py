"""The explanation of an answer, in sentences with numbers.

What limits the best plan; what the runner-up loses, and where; what more hardware would bring; the
plans that no other beats in time, memory and staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ganglion.decide.costs import CATEGORIES, Cluster
from ganglion.decide.plan import Plan
from ganglion.decide.planner.answer import Answer, PlannedLayout, StepParts
from ganglion.decide.planner.question import Question
from ganglion.decide.planner.search import priced
from ganglion.decide.predict import predicted_memory
from ganglion.decide.schedules.pipeline import check_planned
from ganglion.errors import ConfigError
from ganglion.units import GIB, format_bytes, format_time

_MORE_MEMORY_GIB = 8
# How much faster a change must make a step to be worth a word.
_LEAST_GAIN = 0.005

Ask = Callable[[Question], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A change of the hardware, and the best plan with it; None if there is none."""

    change: str
    best: PlannedLayout | None

    def sentence(self, before: PlannedLayout) -> str:
        """Return what the change brings."""
        if self.best is None:
            return f"With {self.change}, no layout divides the model and the batch."
        rate = self.best.tokens_per_day / before.tokens_per_day
        now = f"{self.best.layout}, {self.best.plan.schedule}, {format_time(self.best.step_s)}"
        if rate < 1 + _LEAST_GAIN:
            return f"With {self.change}, nothing is gained ({now})."
        return f"With {self.change}, a step takes {1 / rate:.1%} of the time ({now})."


def explain(answer: Answer, ask: Ask) -> list[str]:
    """Return sentences on an answer; `ask` answers changed questions."""
    best = answer.best
    lines = [limit(best), *memory_lines(answer)]
    runner_up = next((one for one in answer.plans if one.layout != best.layout), None)
    if runner_up is None and len(answer.plans) > 1:
        runner_up = answer.plans[1]
    if runner_up is not None:
        lines.append(comparison(best, runner_up))
    lines += [one.sentence(best) for one in what_ifs(answer.question, ask)]
    return lines


def limit(row: PlannedLayout) -> str:
    """Return what a step spends its time on."""
    named = sorted(row.parts.named().items(), key=lambda item: -item[1])
    most, *others = [(name, value) for name, value in named if value / row.step_s >= 0.01]
    text = ", ".join(f"{name} {value / row.step_s:.0%}" for name, value in others)
    return (
        f"A step of {row.layout} under {row.plan.schedule} takes {format_time(row.step_s)}: "
        f"{most[1] / row.step_s:.0%} are {most[0]}" + (f"; then {text}." if text else ".")
    )


def memory_lines(answer: Answer) -> list[str]:
    """Return how much of the memory the best plan needs, and what was too large."""
    best, budget = answer.best, answer.question.memory_bytes
    lines = [
        f"A rank holds at most {format_bytes(best.memory_bytes)} of {format_bytes(budget)} "
        f"({best.memory_bytes / budget:.0%}); {best.storage if best.storage != '-' else 'nothing'} "
        f"was needed for that."
    ]
    if answer.num_too_large:
        lines.append(
            f"{answer.num_too_large} of {answer.num_considered} layouts with a schedule need more "
            f"memory than a rank has."
        )
    return lines


def comparison(best: PlannedLayout, other: PlannedLayout) -> str:
    """Return what another plan loses, and in which part of the step."""
    lost_s = other.step_s - best.step_s
    where, most_s = largest_loss(_per_sample(best), _per_sample(other))
    alike = other.layout == best.layout
    name = f"{other.plan.schedule}, microbatches of {other.plan.microbatch_size}"
    return (
        f"The runner-up, {name if alike else f'{other.layout} under {other.plan.schedule}'}, takes "
        f"{format_time(other.step_s)}, {lost_s / best.step_s:.1%} longer"
        + (f": it loses most in {where} ({format_time(most_s)})." if most_s > 0 else ".")
    )


def largest_loss(best: Mapping[str, float], other: Mapping[str, float]) -> tuple[str, float]:
    """Return the part in which another plan spends most time more."""
    losses = {name: other[name] - best[name] for name in best}
    where = max(losses, key=losses.__getitem__)
    return where, losses[where]


def _per_sample(row: PlannedLayout) -> Mapping[str, float]:
    parts: StepParts = row.parts
    return parts.named()


# --- one plan ------------------------------------------------------------------------------------


def remedies(question: Question, row: PlannedLayout) -> list[str]:
    """Return changes of one field of a plan that make its step shorter, the best first."""
    found = []
    for changed, name in _single_changes(row.plan):
        try:
            check_planned(changed)
            new = priced(question, changed)
        except ConfigError:
            continue
        gain = 1 - new.step_s / row.step_s
        if gain > _LEAST_GAIN and new.memory_bytes <= question.memory_bytes:
            found.append((gain, f"With {name}, a step would take {gain:.0%} less time."))
    return [text for _, text in sorted(found, reverse=True)[:3]]


def _single_changes(plan: Plan) -> Iterator[tuple[Plan, str]]:
    for schedule in _OTHER_SCHEDULES if plan.pipe > 1 else ():
        if schedule != plan.schedule:
            yield replace(plan, schedule=schedule, chunks=0, limit=0), f"schedule = {schedule}"
    if plan.recompute == "full":
        yield replace(plan, recompute="none", recompute_every=0), "recompute = none"
    if plan.offload != "none":
        yield replace(plan, offload="none"), "offload = none"
    if not plan.overlap:
        yield replace(plan, overlap=True), "overlap = true"


_OTHER_SCHEDULES = ("one_f_one_b", "zero_bubble", "message_driven", "two_bw")


def memory_sentence(question: Question, plan: Plan) -> list[str]:
    """Return what the fullest rank holds, largest first, and what would make it less."""
    held = predicted_memory(question.shape, plan, question.rules)
    worst = max(held, key=lambda memory: memory.total)
    sizes = sorted(((getattr(worst, name), name) for name in CATEGORIES), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in sizes if size)
    fits = "fits" if worst.total <= question.memory_bytes else "does not fit"
    lines = [
        f"A rank of pipe coordinate {held.index(worst)} holds most, {format_bytes(worst.total)} of "
        f"{format_bytes(question.memory_bytes)}, and {fits}: {parts}."
    ]
    for changed, name in _smaller(question, plan):
        most = max(m.total for m in predicted_memory(question.shape, changed, question.rules))
        if most < worst.total:
            lines.append(f"With {name}, it would be {format_bytes(most)}.")
    return lines


def _smaller(question: Question, plan: Plan) -> Iterator[tuple[Plan, str]]:
    """Yield plans that may need less memory."""
    if plan.recompute == "none":
        yield replace(plan, recompute="full"), "recompute = full"
    for tier in question.cluster.tiers:
        if plan.offload == "none":
            yield replace(plan, offload=tier), f"offload = {tier}"


# --- more hardware -------------------------------------------------------------------------------


def what_ifs(question: Question, ask: Ask) -> list[WhatIf]:
    """Return what one more node, twice the bandwidth between nodes, or more memory would bring."""
    return [WhatIf(change=change, best=_best(new, ask)) for change, new in _changes(question)]


def _changes(question: Question) -> list[tuple[str, Question]]:
    cluster, found = question.cluster, []
    node = cluster.ranks_per_node
    if cluster.num_nodes is None and question.num_ranks % node == 0:
        found.append(("one more node", replace(question, num_ranks=question.num_ranks + node)))
    link = "inter" if question.num_ranks > node else "intra"
    faster = _with_twice(cluster, link)
    if faster is not None and question.num_ranks > 1:
        where = "between nodes" if link == "inter" else "between ranks"
        found.append((f"twice the bandwidth {where}", replace(question, cluster=faster)))
    more = question.memory_bytes + _MORE_MEMORY_GIB * GIB
    found.append((f"{_MORE_MEMORY_GIB} GiB more a rank", replace(question, memory_bytes=more)))
    return found


def _with_twice(cluster: Cluster, name: str) -> Cluster | None:
    link = getattr(cluster, name)
    if link is None:
        return None
    collective = None if link.collective_gbps is None else 2 * link.collective_gbps
    faster = replace(link, bandwidth_gbps=2 * link.bandwidth_gbps, collective_gbps=collective)
    return replace(cluster, **{name: faster})


def _best(question: Question, ask: Ask) -> PlannedLayout | None:
    try:
        return ask(question).best
    except ConfigError:
        return None
