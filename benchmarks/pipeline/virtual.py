"""Parts `virtual` and `jitter` of the pipeline benchmark: stages that sleep instead of computing.

So 4 and 8 ranks fit on 2 cores, and what a step takes beyond its theoretical time is the cost of
schedule, engine, autograd and messages. The theoretical time is that of Ganglion's simulator for
the same schedule, times and options, with messages that take no time.

With jitter, every computation takes its time times a log-normal factor that follows from (seed,
stage, microbatch, kind) alone: both sides meet the same ones.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from benchmarks.harness import Contestant, Figures
from benchmarks.pipeline.delay import DelayedStage, Departures, delayed_world
from benchmarks.pipeline.real import timed
from benchmarks.pipeline.torch_pipeline import CPU, ONE_F_ONE_B, torch_steps
from ganglion import Plan, parallelize
from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import ScheduleOptions, make_schedule
from ganglion.decide.schedules.pipeline.action import UPDATE
from ganglion.decide.simulator import SimulationOptions, simulate
from ganglion.execute.comm import torch_world

NUM_FLOATS = 16 << 10  # 64 KB a message
make_optimizer = partial(torch.optim.SGD, lr=1e-3)


@dataclass(frozen=True)
class VirtualTask:
    """What a stage pretends to do, and how many steps a turn times after one that it does not."""

    steps: int
    forward_s: float = 0.010
    backward_s: float = 0.020
    jitter: float = 0.0
    delay_s: float = 0.0
    seed: int = 0


FULL = VirtualTask(steps=6)
QUICK = VirtualTask(steps=2)
JITTER, DELAY_S = 0.3, 0.002


class Count:
    """The microbatches of a stage: how many came, are in flight, and were at most.

    No attributes of the module: setting those costs more than the sum.
    """

    def __init__(self) -> None:
        self.num_forwards = self.num_live = self.peak_live = 0

    def enter(self) -> int:
        """Return the number of the next microbatch; forwards come in the order of theirs."""
        self.num_forwards += 1
        self.num_live += 1
        self.peak_live = max(self.peak_live, self.num_live)
        return self.num_forwards - 1

    def leave(self) -> None:
        self.num_live -= 1


class SleepingBlock(nn.Module):
    """A stage of a model: sleeps in forward and in backward."""

    def __init__(self, stage: int, task: VirtualTask) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.stage = stage
        self.task = task
        self.count = Count()

    def forward(self, x: Tensor) -> Tensor:
        microbatch = self.count.enter()
        output: Tensor = _Sleep.apply(x, self.weight, self, microbatch)  # type: ignore[no-untyped-call]
        return output

    def sleep(self, kind: str, base_s: float, microbatch: int) -> None:
        factor = 1.0
        if self.task.jitter:
            key = f"{self.task.seed} {self.stage} {microbatch} {kind}"
            factor = random.Random(key).lognormvariate(0.0, self.task.jitter)
        time.sleep(base_s * factor)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, block: SleepingBlock, microbatch: int
    ) -> Tensor:
        ctx.of = (block, microbatch)
        block.sleep("F", block.task.forward_s, microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        block, microbatch = ctx.of
        block.sleep("B", block.task.backward_s, microbatch)
        block.count.leave()
        return gradient, gradient.new_zeros(1), None, None


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def make_batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_microbatches, NUM_FLOATS), torch.zeros(num_microbatches, 1)


# --- contestants -------------------------------------------------------------------------------

Turn = Callable[[], Figures]


def build_ganglion(
    name: str, num_ranks: int, options: dict[str, Any], task: VirtualTask, folder: Path
) -> Turn:
    rank, num_microbatches = dist.get_rank(), 2 * num_ranks
    plan = Plan(
        pipe=num_ranks,
        num_microbatches=num_microbatches,
        stage_boundaries=tuple(range(1, num_ranks)),
        **options,
    )
    world = torch_world(rank, plan.mesh(), timeout_s=120)
    if task.delay_s:
        world = delayed_world(world, Departures(folder / name, num_ranks, task.delay_s))
    blocks = [SleepingBlock(stage, task) for stage in range(num_ranks)]
    run = parallelize(nn.Sequential(*blocks), mean_loss, make_optimizer, plan, world=world)
    steps = run.steps(itertools.repeat(make_batch(num_microbatches)))
    return partial(_turn, steps, blocks[rank], task)


def build_torch(name: str, num_ranks: int, task: VirtualTask, folder: Path) -> Turn:
    rank, num_microbatches = dist.get_rank(), 2 * num_ranks
    block = SleepingBlock(rank, task)
    given = torch.zeros(1, NUM_FLOATS, requires_grad=rank > 0)
    made = torch.zeros(1, NUM_FLOATS, requires_grad=True)
    make_stage: Callable[..., PipelineStage] = PipelineStage
    if task.delay_s:
        departures = Departures(folder / name, num_ranks, task.delay_s)
        make_stage = partial(DelayedStage, departures)
    # With shapes given, torch does not run the block once more to find them.
    stage = make_stage(block, rank, num_ranks, CPU, input_args=given, output_args=made)
    batch = make_batch(num_microbatches)
    steps = torch_steps(ONE_F_ONE_B, [stage], num_microbatches, mean_loss, make_optimizer, batch)
    return partial(_turn, steps, block, task)


def _turn(steps: Iterator[Any], block: SleepingBlock, task: VirtualTask) -> Figures:
    return {
        **bare_computation(task),
        **timed(steps, task.steps, num_before=1),
        "peak_live": float(block.count.peak_live),
    }


def bare_computation(task: VirtualTask, num_microbatches: int = 8) -> Figures:
    """Return the CPU time of one computation of the block, called by nobody but this loop.

    And the time of one forward and backward together, over what they should sleep: no engine with
    autograd can come closer to its theory.
    """
    block = SleepingBlock(0, task)
    given = torch.zeros(1, NUM_FLOATS, requires_grad=True)
    cpu_s, start_s = time.process_time(), time.perf_counter()
    for _ in range(num_microbatches):
        output = block(given)
        torch.autograd.backward(output, torch.zeros_like(output))
    taken_s = (time.perf_counter() - start_s) / num_microbatches
    return {
        "bare_cpu_s": (time.process_time() - cpu_s) / (2 * num_microbatches),
        "bare_over_theory": taken_s / (task.forward_s + task.backward_s),
    }


@dataclass(frozen=True)
class Entry:
    """A contestant of the virtual parts, and what its step should take."""

    contestant: Contestant
    num_ranks: int
    schedule: str
    options: dict[str, Any]

    @property
    def num_microbatches(self) -> int:
        return 2 * self.num_ranks

    def cap(self) -> int:
        """Return how many microbatches the first stage may have in flight."""
        schedule = make_schedule(self.schedule, 0, self.num_ranks, _options(self.options))
        return schedule.live_bound or self.num_microbatches


def entries(part: str, num_ranks: int) -> list[Entry]:
    """Return who takes part in `virtual` or `jitter` with so many ranks."""
    raised: dict[str, dict[str, Any]] = {
        "message_driven": {"limit": num_ranks + 2 if part == "virtual" else 2 * num_ranks},
        "two_bw": {"extra": 2},
    }
    ways = [("one_f_one_b", "one_f_one_b"), ("message_driven", "message_driven")]
    ways.append(("two_bw", "two_bw"))
    if part == "jitter":
        ways.append(("two_bw_2p", "two_bw"))
        raised["two_bw_2p"] = {"extra": num_ranks}
    prefix = f"{part}_{num_ranks}_"
    peer = f"{prefix}torch_1f1b"
    build = partial(build_torch, peer, num_ranks)
    found = [Entry(Contestant(peer, num_ranks, build), num_ranks, "one_f_one_b", {})]
    for way, schedule in ways:
        name, options = prefix + way, raised.get(way, {})
        build = partial(build_ganglion, name, num_ranks, {"schedule": schedule, **options})
        contestant = Contestant(name, num_ranks, build, ratio_to=peer)
        found.append(Entry(contestant, num_ranks, schedule, options))
    return found


# --- theory ------------------------------------------------------------------------------------


def theoretical_s(entry: Entry, task: VirtualTask, num_steps: int = 60, skipped: int = 10) -> float:
    """Return the mean time between the ends of steps when messages and engine cost nothing.

    With jitter it is what such a pipeline takes on average, not with these very factors.
    """
    times = StageTimes(forward_s=task.forward_s, backward_s=task.backward_s, jitter=task.jitter)
    simulation = simulate(
        partial(_schedule, entry),
        [times] * entry.num_ranks,
        [entry.num_microbatches] * num_steps,
        SimulationOptions(seed=task.seed),
    )
    ends_s = [0.0] * num_steps
    for action, _, end_s, _, _ in simulation.rows:
        if action.kind == UPDATE:
            ends_s[action.index] = max(ends_s[action.index], end_s)
    return (ends_s[-1] - ends_s[skipped - 1]) / (num_steps - skipped)


def _schedule(entry: Entry, rank: int) -> Any:
    return make_schedule(entry.schedule, rank, entry.num_ranks, _options(entry.options))


def _options(options: dict[str, Any]) -> ScheduleOptions:
    return ScheduleOptions(**options)
