"""Memory of a rank in bytes by category, and the part that depends on parameters alone.

    weights        of the layers
    versions       older weights, for schedules that never flush
    gradients      their sets, and the fp32 copy that some optimizers read
    master         fp32 weights beside half-precision ones
    moments        state of the optimizer and of error feedback
    center         of elastic averaging: the weights that workers share, and those on their way
    buckets        state brought in from a lower tier for an update

Bytes a parameter under AdamW: 16 in fp32 (4 + 4 + 8). Mixed precision as published, and ours with
masters, has 20: weights and gradients in half (2 + 2), master, fp32 gradients (4 + 4), moments
(8); with the last four on a lower tier 4 are left, and 16 for each element of a bucket in flight
(AxoNN, spec A.6). PipeDream-2BW as released keeps a second master: 24 (spec A.9).

Elastic averaging keeps copies of the weights that a rank holds:

| method                     | a worker keeps                                       | copies |
|----------------------------|------------------------------------------------------|--------|
| sync_easgd, local_sgd      | the centre, the sum on its way                       | 2      |
| slow_momentum, diloco      | these, and the momentum of the centre                | 3      |
| original_ and async_easgd, async_measgd | its message to the servers, the force   | 2      |
| async_sgd, async_msgd      | its message, where it started from, its update       | 3      |
| hogwild_easgd, hogwild_sgd | the centre as it saw it last                         | 1      |

A server keeps the centre, the copy that readers see, the last answer to each of P workers (a lost
one is sent again), and a force or a velocity: 3 + P copies, without a velocity 2 + P. Without a
lock it is one, the shared memory itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ganglion.decide.plan import (
    ASYNC_MSGD,
    ASYNC_SGD,
    DILOCO,
    HOGWILD_EASGD,
    HOGWILD_SGD,
    SLOW_MOMENTUM,
    Plan,
)
from ganglion.decide.shapes import FLOAT, Parameter
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError

STEP_BYTES = 4  # AdamW counts the steps of each parameter in a tensor of its own
OPTIMIZERS: tuple[str, ...] = ("adamw", "sgd", "muon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank by category; those on a lower tier are counted apart."""

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
class StateRules:
    """How parameters are kept: formats, optimizer and versions.

    Left open, there are as many sets of gradients as versions: one grows while one is reduced.
    """

    optimizer: str = "adamw"
    has_momentum: bool = True
    error_feedback: bool = False
    formats: Formats = FP32
    num_versions: int = 1
    num_sets: int | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer.name = {self.optimizer!r} has no memory model: use one of "
                f"{list(OPTIMIZERS)}"
            )


def state_memory(parameters: Iterable[Parameter], mesh: Mesh, rules: StateRules) -> Memory:
    """Return the memory of some parameters on a rank, each counted once."""
    held = list(parameters)
    numbers = stored_sizes(held, mesh)
    count = sum(numbers)
    form, num_sets = rules.formats, rules.num_sets or rules.num_versions
    moments = sum(map(_moment_bytes, held, numbers, [rules] * len(held)))
    return Memory(
        weights=count * form.weight,
        versions=count * form.version * (rules.num_versions - 1),
        gradients=count * (form.gradient * num_sets + form.wide_gradient),
        master=count * form.master,
        moments=moments + count * form.version * rules.error_feedback,
    )


def stored_sizes(parameters: Sequence[Parameter], mesh: Mesh) -> list[int]:
    """Return the elements that a rank stores of each parameter; those of layers alike are one."""
    known = {id(one): one for one in parameters}
    sizes = {key: one.num_stored(mesh) for key, one in known.items()}
    return [sizes[id(one)] for one in parameters]


def state_entries(parameter: Parameter, rules: StateRules) -> tuple[str, ...]:
    """Return the names of the optimizer's tensors that are shaped like a parameter."""
    if _uses_adamw(parameter, rules):
        return ("exp_avg", "exp_avg_sq")
    has_one = rules.optimizer == "muon" or rules.has_momentum
    return ("momentum_buffer",) if has_one else ()


def moved_to_tier(
    whole: Memory, parameters: Iterable[Parameter], mesh: Mesh, rules: StateRules, in_flight: int
) -> Memory:
    """Return a rank's state with masters and moments on a lower tier, `in_flight` bytes above it.

    Counts of steps and the memory of error feedback stay; wide gradients are made in flight.
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
    """Return the bytes of optimizer state of a parameter: two numbers an element, one, or none."""
    steps = STEP_BYTES * _uses_adamw(parameter, rules)
    return count * FLOAT * len(state_entries(parameter, rules)) + steps


# --- elastic averaging ---------------------------------------------------------------------------


_UNLOCKED = (HOGWILD_EASGD, HOGWILD_SGD)
_WITH_UPDATE = (ASYNC_SGD, ASYNC_MSGD)


def center_copies(plan: Plan, worker: int) -> int:
    """Return how many copies of its weights a rank of a worker keeps; the first may serve, too."""
    if not plan.averages:
        return 0
    serves = plan.drifts and not plan.servers and worker == 0
    return _worker_copies(plan) + (server_copies(plan) if serves else 0)


def arriving_copies(plan: Plan, worker: int) -> int:
    """Return how many more a rank may have to read at a time: its answer, or those of all workers.

    Sums are made in place, and shared memory needs no message.
    """
    if not plan.drifts or plan.averaging in _UNLOCKED:
        return 0
    return 1 + (plan.data if not plan.servers and worker == 0 else 0)


def server_copies(plan: Plan) -> int:
    """Return how many copies of a centre, or of its part, its server keeps."""
    if plan.averaging in _UNLOCKED:
        return 1
    return 2 + plan.data + (plan.averaging != ASYNC_SGD)


def _worker_copies(plan: Plan) -> int:
    if plan.averaging in _UNLOCKED:
        return 1
    return 3 if plan.averaging in (*_WITH_UPDATE, SLOW_MOMENTUM, DILOCO) else 2
