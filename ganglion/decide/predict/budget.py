"""Memory budgets: settings with which the worst rank of a run fits, chosen before the launch.

A budget of a rank tries settings in the order of their cost in time, each with the memory model,
and takes the first that fits:

    nothing | compute blocks again | optimizer state off the device | both | smaller buckets, too
                                                                    | activations off the device

Keys of [memory] that the user set are never changed. Precision is not chosen: it would change
numbers. A budget for activations alone decides which blocks run again:

    memory.recompute = "budget", memory.activation_mib = 64
        -> recompute = "blocks", recompute_blocks = ["1", "3-4"], and the cut into stages

The blocks that a stage recomputes depend on the cut, so it is decided too: balanced by flop, unless
the plan has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ganglion.decide.config import MemorySection, RunFile, expected_shape, own_code_key
from ganglion.decide.costs import choose_recomputed, written
from ganglion.decide.plan import Plan
from ganglion.decide.predict.memory import (
    planned_boundaries,
    planned_stages,
    predicted_memory,
    state_rules,
)
from ganglion.errors import ConfigError
from ganglion.units import GIB, MIB, format_bytes

# Share of a budget left to the allocator and to math libraries; see docs/memory.md.
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

    def describe(self) -> str:
        """Return one line with the settings that were chosen, and the peak they lead to."""
        chosen = _written(self.chosen) or "nothing to be changed"
        return (
            f"memory.device_gib = {self.run.memory.device_gib:g}: {chosen}; predicted peak "
            f"{format_bytes(self.peak_bytes)} on rank {self.rank}"
        )


def fit_budget(run: RunFile, make_plan: MakePlan, *, tier: str = "disk") -> Fit:
    """Return the first choice that fits the budget of a run file, with `tier` as lower one.

    `make_plan` returns the plan of a run file, or refuses it. Stages without a cut are cut as the
    model predicts, for a cut by measured times might not fit.
    """
    key = own_code_key(run)
    if key is not None:
        raise ConfigError(
            f"memory.device_gib = {run.memory.device_gib:g} needs to know how large the model is, "
            f"but {key} is code of your own: describe it with `ganglion describe` and set "
            f"model.description, or remove memory.device_gib"
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
    """Yield the settings that may be added to those of the user, the cheapest first."""
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
    """Return a choice with its peak; None if it is refused."""
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
    held = predicted_memory(shape, plan, state_rules(changed))
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


# --- a budget for activations ---------------------------------------------------------------------


def decide_activations(run: RunFile, plan: Plan) -> Plan:
    """Return the plan with its budget for activations decided; refuse one that is too small."""
    if plan.recompute != "budget":
        return plan
    key = own_code_key(run)
    if key is not None:
        raise ConfigError(
            f'memory.recompute = "budget" needs to know what blocks keep, but {key} is code of '
            f"your own: set model.description (`ganglion describe` writes it), or "
            f'memory.recompute = "full" or "sqrt"'
        )
    budget_bytes = plan.activation_mib * MIB
    held = planned_stages(expected_shape(run), plan)
    choices = [choose_recomputed(rank.blocks, budget_bytes) for rank in held]
    needed = max(choice.num_bytes for choice in choices)
    if needed > budget_bytes:
        raise ConfigError(_activation_refusal(plan, [choice.num_bytes for choice in choices]))
    spans = sorted(
        (
            range(first + span.start, first + span.stop)
            for rank, choice in zip(held, choices, strict=True)
            for first, mine in zip(rank.first_blocks, choice.segments, strict=True)
            for span in mine
        ),
        key=lambda span: span.start,
    )
    firsts = sorted(first for rank in held for first in rank.first_blocks)
    return replace(
        plan,
        recompute="blocks" if spans else "none",
        recompute_blocks=written(spans),
        activation_mib=0.0,
        stage_boundaries=tuple(firsts[1:]),
    )


def _activation_refusal(plan: Plan, needs: list[int]) -> str:
    worst = max(range(len(needs)), key=needs.__getitem__)
    smallest = -(-needs[worst] * 100 // MIB) / 100  # rounded up, so that it is enough
    return (
        f"memory.activation_mib = {plan.activation_mib:g} is too little for pipe coordinate "
        f"{worst}, even if all of its blocks are computed again: set it to {smallest:g} or more, "
        f'or lower train.microbatch_size, or set memory.offload_activations = "disk"'
    )
