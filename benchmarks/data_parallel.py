"""Data parallelism: one process, two of Ganglion, two of torch DDP, two of torch FSDP2.

    python -m benchmarks.data_parallel [--json] [--quick] [--rounds N]

Everyone trains the same GPT on the same number of tokens a process with the same optimizer and
clipping; speed is tokens a second over all processes. `two_alone` are two processes that do not
talk: what two processes could reach. `torch_ddp_kept_memory` is torch DDP with the allocator
setting that Ganglion makes, to tell that part of the difference from the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Contestant, arguments, measure, rate_rows, report
from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.shapes import GPTShape
from ganglion.execute.comm import torch_world
from ganglion.execute.measure.memory import keep_freed_memory
from ganglion.execute.models import GPT, cross_entropy

MAX_GRAD_NORM = 1.0
make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Task:
    """The model and the batch of one process."""

    layers: int
    hidden: int
    microbatch_size: int = 2
    num_microbatches: int = 8
    steps: int = 1
    seq_len: int = 256
    vocab_size: int = 4096

    def shape(self) -> GPTShape:
        return GPTShape(
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            num_layers=self.layers,
            hidden=self.hidden,
            num_heads=8,
            num_kv_heads=8,
            head_size=self.hidden // 8,
            mlp_hidden=4 * self.hidden,
        )

    @property
    def tokens(self) -> int:
        """Tokens of one turn of one process."""
        return self.microbatch_size * self.num_microbatches * self.seq_len * self.steps


FULL = Task(layers=8, hidden=512)
QUICK = Task(layers=2, hidden=256)


def make_model(task: Task) -> GPT:
    torch.manual_seed(0)
    return GPT(task.shape())


def make_batch(task: Task) -> tuple[Tensor, Tensor]:
    size = (task.microbatch_size * task.num_microbatches, task.seq_len + 1)
    ids = torch.randint(task.vocab_size, size)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def microbatches(task: Task) -> Iterable[tuple[Tensor, Tensor]]:
    inputs, targets = make_batch(task)
    size = task.microbatch_size
    return zip(inputs.split(size), targets.split(size), strict=True)


def plain_turn(
    task: Task, model: nn.Module, on_microbatch: Callable[[bool], None]
) -> Callable[[], None]:
    """Return the loop everybody writes around torch: accumulate, clip, update."""
    optimizer = make_optimizer(model.parameters())

    def turn() -> None:
        for _ in range(task.steps):
            optimizer.zero_grad()
            for index, (inputs, targets) in enumerate(microbatches(task)):
                on_microbatch(index == task.num_microbatches - 1)
                loss = cross_entropy(model(inputs), targets) / task.num_microbatches
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()

    return turn


def build_alone(task: Task) -> Callable[[], None]:
    return plain_turn(task, make_model(task), lambda last: None)


def build_ddp(task: Task) -> Callable[[], None]:
    model = DistributedDataParallel(make_model(task), gradient_as_bucket_view=True)

    def on_microbatch(last: bool) -> None:
        model.require_backward_grad_sync = last  # what no_sync() sets, for all but the last

    return plain_turn(task, model, on_microbatch)


def build_ddp_kept_memory(task: Task) -> Callable[[], None]:
    keep_freed_memory()
    return build_ddp(task)


def build_fsdp2(task: Task) -> Callable[[], None]:
    model = make_model(task)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        for half in layer.children():
            fully_shard(half, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_turn(task, model, model.set_requires_gradient_sync)  # type: ignore[operator]


def build_ganglion(task: Task) -> Callable[[], None]:
    plan = Plan(
        data=dist.get_world_size(),
        microbatch_size=task.microbatch_size,
        num_microbatches=task.num_microbatches,
    )
    world = torch_world(dist.get_rank(), plan.mesh(), timeout_s=300)
    run = parallelize(
        make_model(task),
        cross_entropy,
        make_optimizer,
        plan,
        RunSettings(max_grad_norm=MAX_GRAD_NORM),
        world=world,
    )

    def turn() -> None:
        for _ in run.steps(make_batch(task) for _ in range(task.steps)):
            pass

    return turn


CONTESTANTS = [
    Contestant("one_process", 1, build_alone),
    Contestant("two_alone", 2, build_alone, ratio_to="one_process"),
    Contestant("ganglion", 2, build_ganglion, ratio_to="torch_ddp"),
    Contestant("torch_ddp", 2, build_ddp, ratio_to="two_alone"),
    Contestant("torch_ddp_kept_memory", 2, build_ddp_kept_memory, ratio_to="torch_ddp"),
    Contestant("torch_fsdp2", 2, build_fsdp2, ratio_to="torch_ddp"),
]


def main() -> None:
    options = arguments("Data parallelism against torch DDP and FSDP2.")
    task = QUICK if options.quick else FULL
    rounds = options.rounds or (5 if options.quick else 7)
    seconds = measure(CONTESTANTS, (task,), rounds)
    amounts = {c.name: float(task.tokens * c.num_ranks) for c in CONTESTANTS}
    rows = rate_rows(CONTESTANTS, seconds, amounts, "tokens/s")
    notes = {
        "model": f"GPT {task.layers} layers, hidden {task.hidden}, sequence {task.seq_len}, "
        f"vocabulary {task.vocab_size}, {task.num_microbatches} microbatches of "
        f"{task.microbatch_size}, fp32" + (" (quick: a smaller model)" if options.quick else ""),
        "rounds": rounds,
        "threads_a_process": 1,
    }
    report("data parallel", rows, as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
