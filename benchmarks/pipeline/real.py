"""Part `real` of the pipeline benchmark: a GPT on two stages, each a process with one thread.

Everyone trains the model of `data_parallel.py` on the same batches with the same optimizer and
clipping. Ganglion measures the blocks and cuts where the two stages take equally long; torch's
stages have as many layers each, as its users split them. `ideal` are two processes that do not
talk, each with half of the batch.

A pipeline that never flushes is timed between the ends of steps, the first of a turn left out; in
between turns it stays full.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from benchmarks import data_parallel
from benchmarks.data_parallel import (
    MAX_GRAD_NORM,
    Task,
    make_batch,
    make_model,
    make_optimizer,
    plain_turn,
)
from benchmarks.harness import Contestant, Figures
from benchmarks.pipeline.torch_pipeline import (
    CPU,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZBV,
    TorchWay,
    even_split,
)
from benchmarks.pipeline.torch_pipeline import torch_steps as run_torch
from ganglion import Plan, RunSettings, parallelize
from ganglion.execute.comm import torch_world
from ganglion.execute.measure.memory import keep_freed_memory
from ganglion.execute.models import cross_entropy

NUM_RANKS = 2
Turn = Callable[[], Figures]


@dataclass(frozen=True)
class RealTask:
    """The model and batch, and how many steps a turn times."""

    model: Task
    steps: int
    steady_steps: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.model.tokens


FULL = RealTask(data_parallel.FULL, steps=2, steady_steps=4)
QUICK = RealTask(Task(layers=4, hidden=128, seq_len=64, vocab_size=1024), steps=2, steady_steps=4)


def timed(steps: Iterator[Any], num_steps: int, num_before: int = 0) -> Figures:
    """Take `num_before` steps, then time some: from when to when, and the CPU time of one."""
    for _ in range(num_before):
        next(steps)
    from_s, from_cpu_s = time.monotonic(), time.process_time()
    for _ in range(num_steps):
        next(steps)
    cpu_s = (time.process_time() - from_cpu_s) / num_steps
    return {"from_s": from_s, "to_s": time.monotonic(), "num_steps": num_steps, "cpu_s": cpu_s}


def step_seconds(ranks: Sequence[Figures]) -> float:
    """Return the time of a step: a step ends when it has ended on all ranks of the host."""
    from_s, to_s = (max(said[key] for said in ranks) for key in ("from_s", "to_s"))
    return (to_s - from_s) / ranks[0]["num_steps"]


def build_ganglion(options: dict[str, Any], task: RealTask) -> Turn:
    model = task.model
    plan = Plan(
        pipe=NUM_RANKS,
        microbatch_size=model.microbatch_size,
        num_microbatches=model.num_microbatches,
        **options,
    )
    inputs, targets = batch = make_batch(model)
    run = parallelize(
        make_model(model),
        cross_entropy,
        make_optimizer,
        plan,
        RunSettings(
            max_grad_norm=MAX_GRAD_NORM,
            sample=(inputs[: model.microbatch_size], targets[: model.microbatch_size]),
        ),
        world=torch_world(dist.get_rank(), plan.mesh(), timeout_s=300),
    )
    steps = run.steps(itertools.repeat(batch))
    first_cut = float(run.plan.stage_boundaries[0])
    num_steps, num_before = (task.steady_steps, 1) if plan.schedule == "two_bw" else (task.steps, 0)
    return lambda: {**timed(steps, num_steps, num_before), "first_cut": first_cut}


def build_torch(way: TorchWay, keeps_memory: bool, task: RealTask) -> Turn:
    if keeps_memory:
        keep_freed_memory()
    stage_map = way.stage_map(NUM_RANKS)
    model = make_model(task.model)
    layers = [nn.Sequential(*layer.children()) for layer in model.layers]
    parts = even_split(model.embedding, layers, model.head, stage_map.num_stages)
    stages = [
        PipelineStage(parts[number], number, stage_map.num_stages, CPU)
        for number in stage_map.stages_of(dist.get_rank())
    ]
    steps = run_torch(
        way,
        stages,
        task.model.num_microbatches,
        cross_entropy,
        make_optimizer,
        make_batch(task.model),
        MAX_GRAD_NORM,
    )
    return partial(timed, steps, task.steps)


def build_ideal(task: RealTask) -> Turn:
    keep_freed_memory()
    half = replace(task.model, num_microbatches=task.model.num_microbatches // NUM_RANKS)
    turn = plain_turn(half, make_model(half), lambda last: None)
    return partial(timed, (turn() for _ in itertools.count()), task.steps)


def _ganglion(name: str, **options: Any) -> Contestant:
    build = partial(build_ganglion, {"schedule": name, **options})
    return Contestant(name, NUM_RANKS, build, ratio_to="torch_1f1b")


def _torch(name: str, way: TorchWay, *, keeps_memory: bool = False) -> Contestant:
    peer = None if name == "torch_1f1b" else "torch_1f1b"
    return Contestant(name, NUM_RANKS, partial(build_torch, way, keeps_memory), ratio_to=peer)


CONTESTANTS = [
    Contestant("ideal", NUM_RANKS, build_ideal, ratio_to="torch_1f1b"),
    _torch("torch_1f1b", ONE_F_ONE_B),
    _ganglion("two_bw"),
    _ganglion("message_driven"),
    _ganglion("one_f_one_b"),
    _torch("torch_interleaved", INTERLEAVED),
    _ganglion("interleaved"),
    _torch("torch_zbv", ZBV),
    _ganglion("zero_bubble"),
    _ganglion("zero_bubble_v"),
    _torch("torch_gpipe", GPIPE),
    _torch("torch_1f1b_kept_memory", ONE_F_ONE_B, keeps_memory=True),
]
# Whom a contestant has to beat beside torch's 1F1B.
PEERS = {
    "two_bw": "ideal",
    "interleaved": "torch_interleaved",
    "zero_bubble": "torch_zbv",
    "zero_bubble_v": "torch_zbv",
}
