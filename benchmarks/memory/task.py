"""A GPT in mixed precision with its optimizer state in memory or on disk, each in its own process.

Both sides store weights in bf16 and compute in fp32, block by block: products in bf16 are slow on
processors without units for them. Freed memory goes back to the kernel at once on both sides, so
that resident memory tells what is in use.

The state of a model is what the process holds above its own baseline while it updates weights, when
no activations are alive: the kernel's peak, reset before each update.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.data_parallel import make_optimizer
from benchmarks.harness import Contestant, Figures
from ganglion import Plan, RunSettings, parallelize
from ganglion.cli.environment import usable_cores
from ganglion.decide.shapes import GPTShape
from ganglion.execute.comm import torch_world
from ganglion.execute.measure.memory import MemoryWatch
from ganglion.execute.models import GPT, cross_entropy
from ganglion.execute.offload import DiskTier
from ganglion.execute.offload.tiers import page_buffer
from ganglion.execute.train import Run
from ganglion.units import MIB

CPU = torch.device("cpu")
RESIDENT, DISK = "none", "disk"
Turn = Callable[[], Figures]


@dataclass(frozen=True)
class StateTask:
    """The model, its microbatch of one sequence, and where its state may go."""

    layers: int
    hidden: int
    vocab_size: int
    seq_len: int
    bucket_size: int
    folder: str
    steps: int = 1

    def shape(self) -> GPTShape:
        return GPTShape(
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            num_layers=self.layers,
            hidden=self.hidden,
            num_heads=self.hidden // 64,
            num_kv_heads=self.hidden // 64,
            head_size=64,
            mlp_hidden=4 * self.hidden,
        )

    def batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(self.vocab_size, (num_microbatches, self.seq_len + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_run(task: StateTask, plan: Plan) -> Run:
    """Build the model and the run of a plan of one rank."""
    torch.manual_seed(0)
    return parallelize(
        GPT(task.shape()),
        cross_entropy,
        make_optimizer,
        replace(plan, bucket_size=task.bucket_size),
        RunSettings(keep_freed=False, offload_dir=Path(task.folder)),
        world=torch_world(dist.get_rank(), plan.mesh(), timeout_s=300),
        device=CPU,
    )


def mixed_plan(offload: str, num_microbatches: int = 1, recompute: str = "none") -> Plan:
    return Plan(
        precision="bf16_master",
        compute_fp32=True,
        offload=offload,
        recompute=recompute,
        num_microbatches=num_microbatches,
    )


def build_side(offload: str, num_microbatches: int, task: StateTask) -> Turn:
    """Return what times some steps, and tells the state of the model."""
    torch.set_num_threads(usable_cores())
    watch = MemoryWatch(CPU)
    run = make_run(task, mixed_plan(offload, num_microbatches))
    num_parameters = sum(p.numel() for p in run.tensors()["weights"])
    peaks = watch_updates(run, watch)
    losses = (result.loss for result in run.steps(itertools.repeat(task.batch(num_microbatches))))
    first_loss = next(losses)  # makes the state

    def turn() -> Figures:
        start_s = time.perf_counter()
        for _ in range(task.steps):
            last_loss = next(losses)
        return {
            "step_s": (time.perf_counter() - start_s) / task.steps,
            "state_bytes": max(peaks[1:]) / num_parameters,
            "num_parameters": num_parameters,
            "first_loss": first_loss,
            "last_loss": last_loss,
        }

    return turn


def watch_updates(run: Run, watch: MemoryWatch) -> list[int]:
    """Return the peaks of memory during updates: a list that grows with every step."""
    (update,), peaks = run._parts.updates, list[int]()
    step = update.step

    def watched(*arguments: object) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from now on
        step(*arguments)  # type: ignore[arg-type]
        peaks.append(watch.peak_bytes())

    update.step = watched  # type: ignore[method-assign]
    return peaks


def contestants(counts: Sequence[int]) -> list[Contestant]:
    """Return both sides for each number of microbatches a step."""
    return [
        Contestant(f"{name}_{count}", 1, partial(build_side, offload, count))
        for count in counts
        for name, offload in (("resident", RESIDENT), ("offloaded", DISK))
    ]


def disk_rates(folder: Path, num_bytes: int) -> dict[str, float]:
    """Return the MB/s at which the disk tier writes and reads in a folder, past the page cache."""
    tier = DiskTier(folder, CPU)
    region, buffer = tier.reserve(num_bytes), page_buffer(16 * MIB, CPU).fill_(1)
    starts = range(0, num_bytes, buffer.numel())
    rates = {}
    for name, move in (("write", region.write_from), ("read", region.read_into)):
        from_s = time.perf_counter()
        for start in starts:
            move(start, buffer)
        rates[f"disk_{name}_mb_s"] = round(num_bytes / 1e6 / (time.perf_counter() - from_s))
    tier.close()
    return rates
