"""A memory budget: the cheapest settings of a run with which its worst rank fits, or a refusal.

Settings are tried in the order of what they cost in time, each with the memory model, and the
first that fits is taken:

    nothing | compute blocks again | optimizer state off the device | both | smaller buckets, too
                                                                    | activations off the device

What the user set in [memory] is never changed. Precision is not chosen: it would change numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ganglion.decide.config import MemorySection, RunFile
from ganglion.decide.plan import Plan
from ganglion.decide.predict.expected import expected_shape
from ganglion.decide.predict.memory import MemoryOptions, planned_boundaries, predicted_memory
from ganglion.errors import ConfigError
from ganglion.units import GIB, format_bytes

# Of a budget, what is left to the allocator and to math libraries; see docs/memory.md.
RESERVE = 0.05
_RECOMPUTES = ("none", "full", "sqrt")
_BUCKET_SIZES = (2**22, 2**20, 2**18)  # elements

MakePlan = Callable[[RunFile], Plan]
Choice = Mapping[str, object]  # keys of [memory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A run that fits, and its plan; `chosen` are the keys of [memory] that the budget set."""

    run: RunFile
    plan: Plan
    chosen: Choice
    rank: int
    peak_bytes: int

    def told(self) -> str:
        """Say in one line what was chosen and what it needs."""
        chosen = _written(self.chosen) or "nothing to be changed"
        return (
            f"memory.device_gib = {self.run.memory.device_gib:g}: {chosen}; predicted peak "
            f"{format_bytes(self.peak_bytes)} on rank {self.rank}"
        )


def fit_budget(run: RunFile, make_plan: MakePlan, *, tier: str = "disk") -> Fit:
    """Return the first choice that fits the budget of a run file, with `tier` as lower one.

    `make_plan` returns the plan of a run file, and refuses what cannot be. Stages that nobody cut
    are cut as the model predicts, for a cut by measured times might not fit.
    """
    if run.model.build or run.data.kind == "dataset":
        key = "model.build" if run.model.build else 'data.kind = "dataset"'
        raise ConfigError(
            f"memory.device_gib = {run.memory.device_gib:g} needs to know how large the model is, "
            f"but {key} is code of your own: set memory.recompute and offload yourself, and "
            f"remove memory.device_gib"
        )
    smallest: Fit | None = None
    for choice in _choices(run.memory, tier):
        fit = _fit(run, choice, make_plan)
        if fit is None:
            continue
        if fit.peak_bytes <= _usable_bytes(run.memory.device_gib):
            return fit
        if smallest is None or fit.peak_bytes < smallest.peak_bytes:
            smallest = fit
    assert smallest is not None, "the user's own settings are a choice"
    raise _refusal(run, smallest)


def _choices(given: MemorySection, tier: str) -> Iterator[Choice]:
    """Yield what may be set beside what the user set, the cheapest first."""
    sizes = (given.bucket_size,) if "bucket_size" in given.model_fields_set else _BUCKET_SIZES
    lower: Sequence[Choice] = [
        {},
        *({"offload": tier, "bucket_size": size} for size in sizes),
        {"offload": tier, "bucket_size": sizes[-1], "offload_activations": tier},
    ]
    for offload, recompute in product(lower, _RECOMPUTES):
        choice = {**offload, **({} if recompute == "none" else {"recompute": recompute})}
        yield {key: value for key, value in choice.items() if key not in given.model_fields_set}


def _fit(run: RunFile, choice: Choice, make_plan: MakePlan) -> Fit | None:
    """Return what a choice needs; None if it cannot be."""
    changed = run.model_copy(update={"memory": run.memory.model_copy(update=dict(choice))})
    try:
        plan = make_plan(changed)
        plan.require_built()
    except ConfigError:
        if not choice:
            raise  # of the user's own
        return None
    shape = expected_shape(run)
    if plan.pipe > 1 and not plan.stage_boundaries:
        plan = replace(plan, stage_boundaries=planned_boundaries(shape, plan))
    held = predicted_memory(shape, plan, MemoryOptions.of(changed))
    totals = [memory.total for memory in held]
    pipe = totals.index(max(totals))
    mesh = plan.mesh()
    rank = next(r for r in range(mesh.num_ranks) if mesh.coordinates(r).pipe == pipe)
    return Fit(run=changed, plan=plan, chosen=choice, rank=rank, peak_bytes=totals[pipe])


def _usable_bytes(device_gib: float) -> int:
    return int(device_gib * GIB * (1 - RESERVE))


def _refusal(run: RunFile, smallest: Fit) -> ConfigError:
    needed = math.ceil(smallest.peak_bytes / (1 - RESERVE) / GIB * 1000) / 1000
    least = f" even with {_written(smallest.chosen)}" if smallest.chosen else ""
    return ConfigError(
        f"memory.device_gib = {run.memory.device_gib:g} is too little: rank {smallest.rank} needs "
        f"{format_bytes(smallest.peak_bytes)}{least}, and {RESERVE:.0%} are left to allocators: "
        f"set memory.device_gib = {needed:g}, or raise parallel.pipe, x, y or z so that a rank "
        f"holds less"
    )


def _written(choice: Choice) -> str:
    """Return settings as a run file has them."""
    quoted = {k: f'"{v}"' if isinstance(v, str) else v for k, v in choice.items()}
    return ", ".join(f"memory.{key} = {value}" for key, value in quoted.items())
