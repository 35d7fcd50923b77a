"""What a rank holds, in bytes by category, and the part of it that depends on parameters alone.

    weights        what layers compute with
    versions       older weights, for schedules that never flush
    gradients      their sets, and the fp32 copy that some optimizers read
    master         fp32 weights beside half-precision ones
    moments        what the optimizer and error feedback remember
    center         of elastic averaging: the weights that workers share, and those on their way
    buckets        what is brought in from a lower tier for an update

Bytes a parameter under AdamW: 16 in fp32 (4 + 4 + 8). Mixed precision as published, and ours with
masters, has 20: weights and gradients in half (2 + 2), master, fp32 gradients (4 + 4), moments
(8); with the last four on a lower tier 4 are left, and 16 for each element of a bucket in flight
(AxoNN, spec A.6). PipeDream-2BW as released keeps a second master: 24 (spec A.9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ganglion.decide.shapes import FLOAT, Parameter
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError

STEP_BYTES = 4  # AdamW counts the steps of each parameter in a tensor of its own
OPTIMIZERS: tuple[str, ...] = ("adamw", "sgd", "muon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank by category; what lies on a lower tier is counted apart."""

    weights: int = 0
    versions: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    center: int = 0
    buckets: int = 0
    activations: int = 0
    recomputed: int = 0
    communication: int = 0
    scratch: int = 0
    lower_tier: int = 0

    @property
    def total(self) -> int:
        """All categories; without the lower tier."""
        return sum(getattr(self, name) for name in CATEGORIES)

    def __add__(self, other: Memory) -> Memory:
        names = [field.name for field in fields(self)]
        return Memory(**{name: getattr(self, name) + getattr(other, name) for name in names})


CATEGORIES: tuple[str, ...] = tuple(
    field.name for field in fields(Memory) if field.name != "lower_tier"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes of an element of each copy; 0: there is none."""

    weight: int = FLOAT
    version: int = FLOAT
    gradient: int = FLOAT
    wide_gradient: int = 0
    master: int = 0


FP32 = Formats()
MIXED = Formats(weight=2, version=2, gradient=2, wide_gradient=4, master=4)
TWO_MASTERS = replace(MIXED, version=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Buckets of `bucket_size` elements that are in flight between a lower tier and the device."""

    bucket_size: int
    num_in_flight: int = 1

    def __post_init__(self) -> None:
        if self.bucket_size < 1 or self.num_in_flight < 1:
            raise ConfigError(
                f"{self.num_in_flight} buckets of {self.bucket_size} elements in flight move "
                f"nothing: use at least 1 of both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """How parameters are kept: formats, optimizer, versions, and what is off the device.

    Left open, there are as many sets of gradients as versions: one grows while one is reduced.
    """

    optimizer: str = "adamw"
    has_momentum: bool = True
    error_feedback: bool = False
    formats: Formats = FP32
    num_versions: int = 1
    num_sets: int | None = None
    tier: Tier | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer.name = {self.optimizer!r} has no memory model: use one of "
                f"{list(OPTIMIZERS)}"
            )


def state_memory(parameters: Iterable[Parameter], mesh: Mesh, rules: StateRules) -> Memory:
    """Return what a rank holds of some parameters, each once."""
    held = list(parameters)
    numbers = [parameter.num_stored(mesh) for parameter in held]
    count = sum(numbers)
    form, num_sets = rules.formats, rules.num_sets or rules.num_versions
    moments = sum(map(_moment_bytes, held, numbers, [rules] * len(held)))
    whole = Memory(
        weights=count * form.weight,
        versions=count * form.version * (rules.num_versions - 1),
        gradients=count * (form.gradient * num_sets + form.wide_gradient),
        master=count * form.master,
        moments=moments + count * form.version * rules.error_feedback,
    )
    return whole if rules.tier is None else _lowered(whole, count, rules, rules.tier)


def state_entries(parameter: Parameter, rules: StateRules) -> tuple[str, ...]:
    """Return what the optimizer remembers that is shaped like a parameter, by name."""
    if _uses_adamw(parameter, rules):
        return ("exp_avg", "exp_avg_sq")
    has_one = rules.optimizer == "muon" or rules.has_momentum
    return ("momentum_buffer",) if has_one else ()


def moved_to_tier(
    whole: Memory, parameters: Iterable[Parameter], mesh: Mesh, rules: StateRules, in_flight: int
) -> Memory:
    """Return a rank's state with masters and moments on a lower tier, `in_flight` bytes above it.

    Counts of steps and what error feedback remembers stay; wide gradients are made in flight.
    """
    held = list(parameters)
    count = sum(parameter.num_stored(mesh) for parameter in held)
    steps = STEP_BYTES * sum(_uses_adamw(parameter, rules) for parameter in held)
    left = steps + count * rules.formats.version * rules.error_feedback
    return replace(
        whole,
        gradients=whole.gradients - count * rules.formats.wide_gradient,
        master=0,
        moments=left,
        buckets=in_flight,
        lower_tier=whole.master + whole.moments - left,
    )


def _uses_adamw(parameter: Parameter, rules: StateRules) -> bool:
    return rules.optimizer == "adamw" or (rules.optimizer == "muon" and not parameter.in_muon)


def _moment_bytes(parameter: Parameter, count: int, rules: StateRules) -> int:
    """Return what the optimizer remembers of a parameter: two numbers an element, one, or none."""
    steps = STEP_BYTES * _uses_adamw(parameter, rules)
    return count * FLOAT * len(state_entries(parameter, rules)) + steps


def _lowered(whole: Memory, count: int, rules: StateRules, tier: Tier) -> Memory:
    """Move master and moments to the lower tier; what an update reads comes in buckets."""
    wide = count * rules.formats.wide_gradient
    updated = wide + whole.master + whole.moments
    in_flight = min(count, tier.bucket_size * tier.num_in_flight)
    return replace(
        whole,
        gradients=whole.gradients - wide,
        master=0,
        moments=0,
        buckets=round(updated * in_flight / count) if count else 0,
        lower_tier=whole.master + whole.moments,
    )
