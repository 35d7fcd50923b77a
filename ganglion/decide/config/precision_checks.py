"""Which settings a precision goes with: what is not built is refused here, before launch."""

from __future__ import annotations

from ganglion.decide.plan import BF16_MASTER, FP16_MASTER, Plan
from ganglion.decide.schedules.pipeline import BUILT_IN, Registry, planned_schedule
from ganglion.errors import ConfigError, NotBuiltError


def check_precision(error_feedback: bool, plan: Plan, schedules: Registry = BUILT_IN) -> None:
    """Refuse masters beside what works on the weights of the model themselves."""
    if not plan.has_masters:
        return
    others = {
        "optimizer.error_feedback = true": error_feedback,
        f'averaging.method = "{plan.averaging}"': plan.averages,
    }
    for setting in (text for text, is_on in others.items() if is_on):
        raise NotBuiltError(
            f'{setting} is not built for train.precision = "{plan.precision}", whose weights '
            f'follow fp32 masters: set train.precision = "bf16" or "fp32"'
        )
    if plan.precision == FP16_MASTER:
        verdict_delay(plan, schedules)


def verdict_delay(plan: Plan, schedules: Registry = BUILT_IN) -> int:
    """Return how many batches begin before the verdict on the gradients of the last is known."""
    late = {planned_schedule(plan, rank, schedules).staleness for rank in range(plan.pipe)}
    if late not in ({0}, {1}):
        raise ConfigError(
            f'train.precision = "{FP16_MASTER}" skips a batch whose gradients overflow in all '
            f'stages alike, but under parallel.schedule = "{plan.schedule}" they update one by one '
            f'(late by {sorted(late)}): set train.precision = "{BF16_MASTER}", or '
            f'parallel.schedule = "two_bw"'
        )
    return late.pop()
