"""The question of a plan: which model, on what, with which batch, and what is already decided.

Fields of a plan that are decided are written as on the command line:

    pipe=6,data=8,order=pipe-data,schedule=1f1b|2bw,microbatch=8

`|` separates alternatives. `order` names axes from the innermost outwards; those left out come
first, in the order of the default.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from ganglion.decide.costs import Cluster, StateRules
from ganglion.decide.plan import BF16, BF16_MASTER, FP32, NO_AVERAGING, Plan
from ganglion.decide.schedules.pipeline import canonical_schedule
from ganglion.decide.shapes import ModelShape
from ganglion.decide.topology import DEFAULT_RANK_ORDER
from ganglion.errors import ConfigError, LayoutError, UnknownKeyError
from ganglion.units import GIB

Fixed = Mapping[str, tuple[object, ...]]  # fields of a plan -> values that are allowed

_SHORT = {
    "order": "rank_order",
    "microbatch": "microbatch_size",
    "mbs": "microbatch_size",
    "activations": "offload_activations",
}
# Follows from the batch, or from the search itself.
_DERIVED = ("num_microbatches",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a planner is asked.

    `fixed` holds the fields of the plan that are decided, each with the values allowed.
    `memory_bytes` is the most that a rank may hold; `max_staleness` the most updates that a
    gradient may be late. Samples are sequences of `sample_tokens` tokens.
    """

    shape: ModelShape
    name: str
    cluster: Cluster
    num_ranks: int
    global_batch_size: int
    memory_bytes: int
    rules: StateRules = field(default_factory=StateRules)
    fixed: Fixed = field(default_factory=dict)
    max_staleness: int | None = None
    sample_tokens: int = 1

    def __post_init__(self) -> None:
        for key, value in (("--gpus", self.num_ranks), ("--batch", self.global_batch_size)):
            if value < 1:
                raise LayoutError(f"{key} {value}: a plan needs at least 1")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise LayoutError(
                f"--max-staleness {self.max_staleness}: use 0 for gradients of the newest weights"
            )
        most = self.cluster.num_nodes
        if most is not None and self.num_ranks > most * self.cluster.ranks_per_node:
            raise LayoutError(
                f"--gpus {self.num_ranks}, but {self.cluster.source} has cluster.num_nodes * "
                f"ranks_per_node = {most} * {self.cluster.ranks_per_node} = "
                f"{most * self.cluster.ranks_per_node}: ask for at most that, or raise "
                f"cluster.num_nodes"
            )

    def allowed(self, name: str, *others: object) -> tuple[object, ...]:
        """Return the values that a field of the plan may have: the fixed ones, or `others`."""
        return self.fixed.get(name, others)

    @property
    def fixes_the_mesh(self) -> bool:
        """Whether one size is left for every axis, those of tensor axes being 1 if not named."""
        known = {axis: self.fixed.get(axis) for axis in ("data", "pipe")}
        return all(sizes is not None and len(sizes) == 1 for sizes in known.values())

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions to try: unless fixed, half where half is faster, with masters.

        Workers of averaging exchange fp32 weights, so they have no masters.
        """
        compute = self.cluster.require_compute()
        averages = self.fixed.get("averaging", (NO_AVERAGING,)) != (NO_AVERAGING,)
        half = BF16 if averages else BF16_MASTER
        fast = half if compute.bf16_tflops > compute.fp32_tflops else FP32
        return tuple(str(value) for value in self.allowed("precision", fast))


def device_bytes(cluster: Cluster) -> int:
    """Return the memory of a rank."""
    return round(cluster.require_compute().memory_gib * GIB)


def parse_fixed(text: str) -> dict[str, tuple[object, ...]]:
    """Return the fields that a text such as `pipe=6,order=pipe-data` fixes."""
    found: dict[str, tuple[object, ...]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, values = word.partition("=")
        name = _SHORT.get(key, key)
        if not equals or not values or name not in _FIELDS or name in _DERIVED:
            raise UnknownKeyError(_unknown(word, key, name))
        found[name] = tuple(_value(name, key, value) for value in values.split("|"))
    return found


_SIZES = ("data", "pipe", "x", "y", "z", "microbatch_size")
_NUMBERS: dict[type, Callable[[str], object]] = {int: int, float: float}
_FIELDS: dict[str, object] = {one.name: one.default for one in fields(Plan)}


def _unknown(word: str, key: str, name: str) -> str:
    if name in _DERIVED:
        return f"--fix {word}: {key} follows from --batch, data, z and microbatch: fix those"
    known = sorted({*_FIELDS, *_SHORT} - {*_DERIVED})
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the fields are {known}"
    return f"--fix {word!r} is not field=value of a plan; {hint}"


def _value(name: str, key: str, text: str) -> object:
    if name == "rank_order":
        return _rank_order(text)
    if name == "schedule":
        return canonical_schedule(text, "--fix schedule")
    default = _FIELDS[name]
    try:
        if name == "stage_boundaries":
            return tuple(int(part) for part in text.split("-"))
        if isinstance(default, bool):
            return ("false", "true").index(text.lower()) == 1
        if isinstance(default, tuple):
            return tuple(text.split("+"))
        value = _NUMBERS[type(default)](text) if type(default) in _NUMBERS else text
    except ValueError as error:
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"--fix {key}={text}: {text!r} is not {kind}") from error
    if name in _SIZES and isinstance(value, int) and value < 1:
        raise LayoutError(f"--fix {key}={text}: a size must be at least 1")
    return value


def _rank_order(text: str) -> tuple[str, ...]:
    """Return a whole rank order from the outer axes alone."""
    given = tuple(text.split("-"))
    unknown = [axis for axis in given if axis not in DEFAULT_RANK_ORDER]
    if unknown or len(set(given)) < len(given):
        raise ConfigError(
            f"--fix order={text} must name axes of {list(DEFAULT_RANK_ORDER)}, each once, from the "
            f"innermost outwards: write order=pipe-data, for example"
        )
    return (*(axis for axis in DEFAULT_RANK_ORDER if axis not in given), *given)
