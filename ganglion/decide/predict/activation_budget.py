"""A budget for activations becomes a decision before anything is launched: which blocks run again.

    memory.recompute = "budget", memory.activation_mib = 64
        -> recompute = "blocks", recompute_blocks = ["1", "3-4"], and the cut into stages

What a stage recomputes depends on its blocks, so the cut is decided too: balanced by flop, unless
the plan has one.
"""

from __future__ import annotations

from dataclasses import replace

from ganglion.decide.config import RunFile
from ganglion.decide.costs import choose_recomputed, written
from ganglion.decide.plan import Plan
from ganglion.decide.predict.expected import expected_shape
from ganglion.decide.predict.memory import planned_stages
from ganglion.errors import ConfigError
from ganglion.units import MIB


def decide_activations(run: RunFile, plan: Plan) -> Plan:
    """Return the plan with its budget for activations decided; refuse one that is too small."""
    if plan.recompute != "budget":
        return plan
    if run.model.build or run.data.kind == "dataset":
        key = "model.build" if run.model.build else 'data.kind = "dataset"'
        raise ConfigError(
            f'memory.recompute = "budget" needs to know what blocks keep, but {key} is code of '
            f'your own: set memory.recompute = "full" or "sqrt", or name memory.recompute_blocks'
        )
    budget_bytes = plan.activation_mib * MIB
    held = planned_stages(expected_shape(run), plan)
    choices = [choose_recomputed(rank.blocks, budget_bytes) for rank in held]
    needed = max(choice.num_bytes for choice in choices)
    if needed > budget_bytes:
        raise ConfigError(_refusal(plan, [choice.num_bytes for choice in choices]))
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


def _refusal(plan: Plan, needs: list[int]) -> str:
    worst = max(range(len(needs)), key=needs.__getitem__)
    smallest = -(-needs[worst] * 100 // MIB) / 100  # rounded up, so that it is enough
    return (
        f"memory.activation_mib = {plan.activation_mib:g} is too little for pipe coordinate "
        f"{worst}, even if all of its blocks are computed again: set it to {smallest:g} or more, "
        f'or lower train.microbatch_size, or set memory.offload_activations = "disk"'
    )
