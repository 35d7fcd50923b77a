"""Which settings of a run go together: averaging, precision, error feedback and steps."""

from __future__ import annotations

from ganglion.decide.config.schema import AveragingSection, RunFile
from ganglion.decide.plan import (
    ASYNC_MEASGD,
    ASYNC_MSGD,
    ASYNCHRONOUS,
    BF16_MASTER,
    DILOCO,
    ELASTIC,
    FP16_MASTER,
    MODE_OF_METHOD,
    SLOW_MOMENTUM,
    Plan,
)
from ganglion.decide.schedules.exchanges import ElasticRate
from ganglion.decide.schedules.pipeline import BUILT_IN, RankSchedule, Registry, planned_schedule
from ganglion.errors import ConfigError, LayoutError, NotBuiltError

DEFAULT_BETA = 0.9
# Keys that only some methods read.
_READERS = {
    "outer_lr": (SLOW_MOMENTUM, DILOCO),
    "outer_momentum": (SLOW_MOMENTUM, DILOCO),
    "center_momentum": (ASYNC_MSGD,),
    "max_staleness": ASYNCHRONOUS,
}


def check_averaging(run: RunFile, plan: Plan) -> None:
    """Refuse rates that diverge, keys without a reader, and schedules with older weights."""
    section = run.averaging
    rates = given_rates(section)
    if not plan.averages:
        return
    check_flushes(plan, planned_schedule(plan, 0))
    _check_readers(section, plan.averaging)
    if plan.averaging in ELASTIC:
        mode = MODE_OF_METHOD[plan.averaging]
        try:
            elastic_rate(section).checked_alpha(run.optimizer.lr, plan.data, section.tau, mode)
        except ConfigError as error:  # it speaks of arguments, which are keys here
            raise ConfigError(f"section [averaging] of the run file: {error}") from error
    elif rates:
        name, value = next(iter(rates.items()))
        raise ConfigError(
            f"averaging.{name} = {value:g} means nothing to averaging.method = "
            f'"{plan.averaging}", which has no elastic force: leave it out'
        )
    if (
        plan.averaging == ASYNC_MEASGD
        and run.optimizer.name == "sgd"
        and run.optimizer.momentum == 0
    ):
        raise ConfigError(
            'averaging.method = "async_measgd" with optimizer.momentum = 0 is "async_easgd": name '
            "that, or set optimizer.momentum = 0.9"
        )


def _check_readers(section: AveragingSection, method: str) -> None:
    for key, readers in _READERS.items():
        value = getattr(section, key)
        if value and method not in readers:
            raise ConfigError(
                f'averaging.{key} = {value:g} means nothing to averaging.method = "{method}": '
                f"leave it out, or choose a method of {list(readers)}"
            )


def check_flushes(plan: Plan, schedule: RankSchedule) -> None:
    """Refuse a schedule whose weights have versions: an exchange would reach one of them."""
    if plan.averages and not schedule.flushes:
        raise NotBuiltError(
            f"averaging.method = {plan.averaging!r} moves weights of which parallel.schedule = "
            f"{plan.schedule!r} keeps older versions: choose a schedule that flushes, such as "
            f"one_f_one_b"
        )


def elastic_rate(section: AveragingSection) -> ElasticRate:
    """Return the one rate that a run file names, or the usual one."""
    rates = given_rates(section) or {"beta": DEFAULT_BETA}
    return ElasticRate(
        rates.get("alpha"), rates.get("beta"), rates.get("rho"), unsafe=section.unsafe
    )


def given_rates(section: AveragingSection) -> dict[str, float]:
    """Return the rates that a run file names; 0 is none."""
    rates = {"alpha": section.alpha, "beta": section.beta, "rho": section.rho}
    return {name: rate for name, rate in rates.items() if rate > 0}


# --- precision -----------------------------------------------------------------------------------


def check_precision(error_feedback: bool, plan: Plan, schedules: Registry = BUILT_IN) -> None:
    """Refuse masters beside methods that change the weights of the model themselves."""
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


# --- error feedback and steps --------------------------------------------------------------------


def check_error_feedback(wanted: bool, plan: Plan, schedules: Registry = BUILT_IN) -> None:
    """Refuse error feedback unless every stage's gradients are late by exactly one update."""
    if not wanted:
        return
    late = [planned_schedule(plan, rank, schedules).staleness for rank in range(plan.pipe)]
    if set(late) == {1}:
        return
    why = "has none that are late" if not any(late) else f"has stages that are late by {late}"
    raise ConfigError(
        f"optimizer.error_feedback = true corrects gradients that are late by one update, but "
        f'parallel.schedule = "{plan.schedule}" {why}: set optimizer.error_feedback = false, or '
        f'parallel.schedule = "two_bw"'
    )


def check_steps(run: RunFile) -> None:
    """Refuse step numbers that contradict each other."""
    if run.train.stop_at > run.train.steps:
        raise LayoutError(
            f"train.stop_at = {run.train.stop_at} lies beyond train.steps = {run.train.steps}: "
            f"lower it, or set 0 to run to the end"
        )
