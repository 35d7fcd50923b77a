"""Whether replicas can be workers of elastic averaging, and at what rate, from numbers alone."""

from __future__ import annotations

from ganglion.decide.config.schema import AveragingSection, RunFile
from ganglion.decide.plan import (
    ASYNC_MEASGD,
    ASYNC_MSGD,
    ASYNCHRONOUS,
    DILOCO,
    ELASTIC,
    MODE_OF_METHOD,
    SLOW_MOMENTUM,
    Plan,
)
from ganglion.decide.schedules.exchanges import ElasticRate
from ganglion.decide.schedules.pipeline import RankSchedule, planned_schedule
from ganglion.errors import ConfigError, NotBuiltError

DEFAULT_BETA = 0.9
# Keys that only some methods read.
_READERS = {
    "outer_lr": (SLOW_MOMENTUM, DILOCO),
    "outer_momentum": (SLOW_MOMENTUM, DILOCO),
    "center_momentum": (ASYNC_MSGD,),
    "max_staleness": ASYNCHRONOUS,
}


def check_averaging(run: RunFile, plan: Plan) -> None:
    """Refuse rates that diverge, keys that nobody reads, and schedules with older weights."""
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
