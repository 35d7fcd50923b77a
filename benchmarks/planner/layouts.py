"""The layouts of the planner benchmark: models, plans, and what the cost model says about them.

Real layouts compute on 2 ranks. Virtual ones have stages that sleep as long as the cost model says
that a stage of a larger GPT computes, so that 4 and 8 ranks fit on 2 cores: what is compared there
is the schedule, the engine and the messages.

Layouts of one `model` train the same global batch, so that there is a best one among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ganglion import Plan
from ganglion.decide.costs import (
    Cluster,
    ComputeClock,
    StageTable,
    StageTimes,
    balanced_boundaries,
    model_work,
)
from ganglion.decide.predict import Prediction, model_times, predict_layout
from ganglion.decide.schedules.pipeline import planned_stage_map
from ganglion.decide.shapes import GPTShape, MLPShape, ModelShape

MESSAGE_FLOATS = 16 << 10  # of the stages that sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model on a plan. `virtual` stages sleep."""

    model: str
    shape: ModelShape
    plan: Plan
    virtual: bool = False
    seen: bool = False

    @property
    def name(self) -> str:
        """The model, the axes, the schedule and the microbatches."""
        plan = self.plan
        axes = [f"{axis}{size}" for axis, size in plan.mesh().sizes().items() if size > 1]
        schedule = [plan.schedule] if plan.pipe > 1 else []
        batch = f"{plan.num_microbatches}x{plan.microbatch_size}"
        return " ".join([self.model, *axes, *schedule, batch])


def gpt(layers: int, hidden: int, seq_len: int, vocab_size: int) -> GPTShape:
    """Return a GPT with heads of 64."""
    heads = max(1, hidden // 64)
    return GPTShape(
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        mlp_hidden=4 * hidden,
    )


SMALL = gpt(4, 128, 64, 256)
LARGE = gpt(4, 256, 128, 512)
MLP = MLPShape(num_inputs=256, num_outputs=16, num_layers=6, hidden=768)
ASLEEP = gpt(16, 320, 128, 512)


def _of(model: str, shape: ModelShape, samples: int, *rows: dict[str, Any]) -> list[Layout]:
    """Return layouts with as many microbatches as a global batch of `samples` needs."""
    found = []
    for row in rows:
        seen = row.pop("seen", False)
        plan = Plan(**row)
        share = samples // (plan.data * plan.z * plan.microbatch_size)
        plan = replace(plan, num_microbatches=share)
        found.append(Layout(model=model, shape=shape, plan=plan, seen=seen))
    return found


def real_layouts(*, quick: bool) -> list[Layout]:
    """Return the layouts on 2 ranks."""
    large = _of(
        "gpt-large",
        LARGE,
        16,
        {"pipe": 2, "schedule": "one_f_one_b", "microbatch_size": 2},
        {"pipe": 2, "schedule": "one_f_one_b", "microbatch_size": 4},
        {"pipe": 2, "schedule": "gpipe", "microbatch_size": 4},
        {"pipe": 2, "schedule": "message_driven", "microbatch_size": 2},
        {"pipe": 2, "schedule": "two_bw", "microbatch_size": 2},
        {"pipe": 2, "schedule": "two_bw", "microbatch_size": 4},
        {"data": 2, "microbatch_size": 2},
        {"data": 2, "microbatch_size": 4, "seen": True},
        {"x": 2, "microbatch_size": 4, "seen": True},
        {"z": 2, "microbatch_size": 4},
    )
    small = _of(
        "gpt-small",
        SMALL,
        32,
        {"pipe": 2, "schedule": "one_f_one_b", "microbatch_size": 8, "seen": True},
        {"pipe": 2, "schedule": "two_bw", "microbatch_size": 8},
        {"pipe": 2, "schedule": "message_driven", "microbatch_size": 4},
        {"data": 2, "microbatch_size": 8},
        {"x": 2, "microbatch_size": 8},
    )
    mlp = _of(
        "mlp",
        MLP,
        512,
        {"pipe": 2, "schedule": "one_f_one_b", "microbatch_size": 64},
        {"pipe": 2, "schedule": "two_bw", "microbatch_size": 128},
        {"data": 2, "microbatch_size": 128, "seen": True},
        {"z": 2, "microbatch_size": 128},
    )
    return [*large[::3], small[0], mlp[2]] if quick else [*large, *small, *mlp]


def virtual_layouts(*, quick: bool) -> list[Layout]:
    """Return the layouts on 4 and 8 ranks."""
    rows: list[dict[str, Any]] = [
        {"pipe": 4, "schedule": "one_f_one_b"},
        {"pipe": 4, "schedule": "two_bw"},
        {"pipe": 4, "schedule": "gpipe"},
        {"pipe": 4, "schedule": "message_driven"},
        {"pipe": 2, "data": 2, "schedule": "one_f_one_b"},
        {"pipe": 8, "schedule": "one_f_one_b"},
        {"pipe": 8, "schedule": "two_bw"},
    ]
    chosen = rows[:2] if quick else rows
    return [
        replace(layout, virtual=True)
        for row in chosen
        for layout in _of("gpt-asleep", ASLEEP, 16, {**row, "microbatch_size": 1})
    ]


# --- what the cost model says --------------------------------------------------------------------


def with_cuts(layout: Layout, cluster: Cluster) -> Layout:
    """Return the layout with its stages cut where the cost model balances them."""
    plan = layout.plan
    if plan.pipe == 1 or plan.stage_boundaries:
        return layout
    clock = ComputeClock(plan, cluster.require_compute())
    blocks = [clock.block(work) for work in model_work(layout.shape, plan)]
    costs = [one.forward_s + one.input_s + one.weight_s for one in blocks]
    cuts = balanced_boundaries(costs, planned_stage_map(plan).num_stages)
    return replace(layout, plan=replace(plan, stage_boundaries=cuts))


def sleeping_times(layout: Layout, cluster: Cluster) -> list[StageTimes]:
    """Return how long each stage of a virtual layout sleeps: what it computes, without engine."""
    compute = cluster.require_compute()
    own_s = compute.action_s + compute.block_s
    times = model_times(layout.shape, layout.plan, _large_enough(layout, cluster))
    return [
        replace(
            one,
            forward_s=max(0.0, one.forward_s - own_s),
            backward_s=max(0.0, one.backward_s + one.weight_s - own_s),
            weight_s=0.0,
        )
        for one in times
    ]


def predicted(layout: Layout, cluster: Cluster, num_steps: int) -> Prediction:
    """Predict a layout; stages that sleep get their sleep and the engine's own time."""
    machine = _large_enough(layout, cluster)
    if layout.virtual:
        compute = cluster.require_compute()
        own_s = compute.action_s + compute.block_s
        asleep = sleeping_times(layout, cluster)
        table = StageTable(
            forward_s=tuple(one.forward_s + own_s for one in asleep),
            backward_s=tuple(one.backward_s + own_s for one in asleep),
            update_s=compute.update_s,
            message_bytes=4 * MESSAGE_FLOATS,
            gradient_bytes=4,
        )
        machine = replace(machine, stages=table)
    return predict_layout(layout.shape, layout.plan, machine, num_steps=num_steps)


def _large_enough(layout: Layout, cluster: Cluster) -> Cluster:
    """Return the machine with a place for every rank: those that sleep share its cores."""
    num_ranks = max(cluster.ranks_per_node, layout.plan.num_ranks)
    return replace(cluster, num_nodes=1, ranks_per_node=num_ranks)


def best_of(model: str, layouts: Sequence[Layout], seconds: dict[str, float]) -> Layout:
    """Return the quickest layout of a model."""
    mine = [one for one in layouts if one.model == model]
    return min(mine, key=lambda one: seconds[one.name])
