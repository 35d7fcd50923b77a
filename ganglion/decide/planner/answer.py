"""The answer of a planner: layouts with what they cost, best first, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ganglion.decide.plan import Plan
from ganglion.decide.planner.question import Question

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where the time of a step goes, on the pipeline rank that computes longest; they add up.

    `peak_s` is what the model's operations take at the peak of the devices; `slower_s` what they
    take longer; `again_s` what recomputation adds; `layers_s` waits for collectives inside layers;
    `exposed_s` waits for messages and reductions; `update_s` the optimizer; `idle_s` the rest.
    """

    peak_s: float
    slower_s: float
    again_s: float
    layers_s: float
    exposed_s: float
    update_s: float
    idle_s: float

    def named(self) -> Mapping[str, float]:
        """Return the parts by what they are for people."""
        return {_PART_NAMES[one.name]: getattr(self, one.name) for one in fields(self)}


_PART_NAMES = {
    "peak_s": "the model's operations at peak rate",
    "slower_s": "operations below peak rate",
    "again_s": "activations computed again",
    "layers_s": "collectives inside layers",
    "exposed_s": "messages and reductions",
    "update_s": "the optimizer",
    "idle_s": "an idle pipeline",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """One plan with its predicted costs.

    `peak_share` counts what recomputation repeats, as published figures do. `staleness` is how many
    updates a gradient is late. `estimated_s` is the step time of the closed form, `score_s` that of
    another method that ranked the plan.
    """

    plan: Plan
    step_s: float
    estimated_s: float | None
    peak_share: float
    memory_bytes: int
    bubble: float
    exposed_s: float
    staleness: int
    tokens_per_day: float
    parts: StepParts
    score_s: float | None = None

    @property
    def layout(self) -> str:
        """The axes that have more than one rank."""
        sizes = {axis: getattr(self.plan, axis) for axis in ("data", "pipe", "x", "y", "z")}
        return " ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"

    @property
    def storage(self) -> str:
        """What is done so that the memory suffices."""
        plan = self.plan
        chosen = [f"recompute {plan.recompute}"] * (plan.recompute != "none")
        chosen += [f"state on {plan.offload}"] * (plan.offload != "none")
        return ", ".join(chosen) or "-"

    def record(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            "layout": {axis: getattr(self.plan, axis) for axis in ("data", "pipe", "x", "y", "z")},
            "schedule": self.plan.schedule,
            "microbatch": self.plan.microbatch_size,
            "step_s": self.step_s,
            "estimated_s": self.estimated_s,
            "score_s": self.score_s,
            "peak_share": self.peak_share,
            "memory_bytes": self.memory_bytes,
            "bubble": self.bubble,
            "exposed_s": self.exposed_s,
            "staleness": self.staleness,
            "tokens_per_day": self.tokens_per_day,
            "parts": asdict(self.parts),
            "plan": asdict(self.plan),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plans of a question, best first; `front` has those that no other beats in everything.

    `num_considered` layouts were estimated; `num_too_large` of them need more memory than there is.
    """

    question: Question
    method: str
    plans: list[PlannedLayout]
    num_considered: int
    num_too_large: int

    @property
    def best(self) -> PlannedLayout:
        """The plan with the shortest step."""
        return self.plans[0]

    @property
    def front(self) -> list[PlannedLayout]:
        """The plans that no other beats in time, memory and staleness at once."""
        return [one for one in self.plans if not any(_beats(other, one) for other in self.plans)]

    @property
    def fits(self) -> bool:
        """Whether the best plan fits; one that does not is priced only if its axes are fixed."""
        return self.best.memory_bytes <= self.question.memory_bytes

    def rank_hours(self, num_tokens: float) -> float:
        """Return the hours of all ranks together to train on a number of tokens."""
        days = num_tokens / self.best.tokens_per_day
        return days * 24 * self.best.plan.num_ranks

    def price(self, num_tokens: float) -> float | None:
        """Return what these hours cost; None where the cluster file has no price."""
        per_hour = self.question.cluster.price_per_hour
        return None if per_hour is None else per_hour * self.rank_hours(num_tokens)


def _beats(one: PlannedLayout, other: PlannedLayout) -> bool:
    mine, others = _figures(one), _figures(other)
    return mine != others and all(a <= b for a, b in zip(mine, others, strict=True))


def _figures(one: PlannedLayout) -> tuple[float, float, int]:
    return one.step_s, one.memory_bytes, one.staleness
