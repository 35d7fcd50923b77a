"""Runs layouts: in every round each is built anew, warmed up and timed, by the same processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Contestant, Figures, measure_figures
from benchmarks.pipeline.virtual import SleepingBlock, VirtualTask, mean_loss
from benchmarks.planner.layouts import MESSAGE_FLOATS, Layout, sleeping_times
from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.config import OptimizerSection
from ganglion.decide.costs import Cluster
from ganglion.decide.shapes import GPTShape, MLPShape
from ganglion.execute.comm import torch_world
from ganglion.execute.measure import Watch
from ganglion.execute.models import build_model, cross_entropy, named_blocks
from ganglion.execute.update import optimizer_factory

WARM_UPS = 2
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
PRELOADED = ("benchmarks.planner.runs", "torch.distributed.checkpoint")


def measured(
    layouts: Sequence[Layout], cluster: Cluster, *, rounds: int, num_steps: int
) -> dict[str, list[float]]:
    """Return the step times of each layout, by round; those that had to wait least for a core.

    Of each layout the half of the rounds counts in which its ranks waited least.
    """
    taken: dict[str, list[tuple[float, float]]] = {}
    for num_ranks in sorted({one.plan.num_ranks for one in layouts}):
        mine = [one for one in layouts if one.plan.num_ranks == num_ranks]
        contestant = Contestant(f"{num_ranks} ranks", num_ranks, build)
        turns = measure_figures(
            [contestant],
            (mine, cluster, num_steps),
            rounds,
            warm_ups=0,
            preloaded=PRELOADED,
            title=contestant.name,
        )
        for turn in turns[contestant.name]:
            for layout in mine:
                taken.setdefault(layout.name, []).append(_step(turn, layout.name, num_steps))
    return {name: _least_disturbed(found) for name, found in taken.items()}


def _step(ranks: Sequence[Figures], name: str, num_steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and the most that a rank waited for a core in it."""
    from_s, to_s = (max(one[f"{name} {end}"] for one in ranks) for end in ("from_s", "to_s"))
    waited_s = max(one[f"{name} waited_s"] for one in ranks)
    return (to_s - from_s) / num_steps, waited_s / num_steps


def _least_disturbed(taken: Sequence[tuple[float, float]]) -> list[float]:
    by_wait = sorted(taken, key=lambda one: one[1] / one[0])
    return [step_s for step_s, _ in by_wait[: -(-len(by_wait) // 2)]]


def build(layouts: Sequence[Layout], cluster: Cluster, num_steps: int) -> Callable[[], Figures]:
    """Return a turn: every layout, one after the other."""

    def turn() -> Figures:
        found: dict[str, float] = {}
        for layout in layouts:
            for key, value in timed(layout, cluster, num_steps).items():
                found[f"{layout.name} {key}"] = value
        return found

    return turn


def timed(layout: Layout, cluster: Cluster, num_steps: int) -> Figures:
    """Train a layout for some steps; return from when to when, and the waits for a core."""
    rank, plan = dist.get_rank(), run_plan(layout)
    torch.manual_seed(0)
    blocks, loss_fn, batch = _asleep(layout, cluster) if layout.virtual else _real(layout)
    watch = Watch(torch.device("cpu"), 0.0)
    run = parallelize(
        blocks,
        loss_fn,
        optimizer_factory(OptimizerSection()),
        plan,
        RunSettings(max_grad_norm=1.0),
        world=torch_world(rank, plan.mesh(), timeout_s=120),
    )
    steps = run.steps(itertools.repeat(batch))
    for _ in range(WARM_UPS):
        next(steps)
    from_s, before_s = time.monotonic(), watch.waited_s()
    for _ in range(num_steps):
        next(steps)
    to_s, after_s = time.monotonic(), watch.waited_s()
    run.drain()
    run.close()
    return {"from_s": from_s, "to_s": to_s, "waited_s": after_s - before_s}


def run_plan(layout: Layout) -> Plan:
    """Return the plan that is run: stages that sleep are one block each."""
    if not layout.virtual:
        return layout.plan
    return replace(layout.plan, stage_boundaries=tuple(range(1, layout.plan.pipe)))


def _real(layout: Layout) -> tuple[dict[str, nn.Module], Loss, Batch]:
    shape, plan = layout.shape, layout.plan
    count = plan.microbatch_size * plan.num_microbatches
    blocks = named_blocks(build_model(shape))
    if isinstance(shape, GPTShape):
        ids = torch.randint(0, shape.vocab_size, (count, shape.seq_len))
        return blocks, cross_entropy, (ids, ids)
    assert isinstance(shape, MLPShape), "the benchmark has these two"
    targets = torch.randint(0, shape.num_outputs, (count,))
    return blocks, cross_entropy, (torch.randn(count, shape.num_inputs), targets)


def _asleep(layout: Layout, cluster: Cluster) -> tuple[dict[str, nn.Module], Loss, Batch]:
    """Return one block a stage, which sleeps; the plan's own cuts are of the real blocks."""
    plan = layout.plan
    blocks: dict[str, nn.Module] = {
        f"stage{stage}": SleepingBlock(
            stage, VirtualTask(steps=1, forward_s=one.forward_s, backward_s=one.backward_s)
        )
        for stage, one in enumerate(sleeping_times(layout, cluster))
    }
    count = plan.num_microbatches * plan.microbatch_size
    return blocks, mean_loss, (torch.zeros(count, MESSAGE_FLOATS), torch.zeros(count, 1))
