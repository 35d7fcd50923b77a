"""Part `real` of the tensor benchmark: a GPT split between two processes with one thread each.

Everyone trains the model of `data_parallel.py` on the same global batch, in as many microbatches,
with the same optimizer and clipping. A microbatch of `x2` and `dtensor_tp`, which split features,
has the rows of both ranks; the others split its rows. `ideal` are two processes that do not talk,
each with half of the batch. The first two steps are not timed: their losses are compared.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from benchmarks import data_parallel
from benchmarks.data_parallel import MAX_GRAD_NORM, Task, make_model, make_optimizer
from benchmarks.harness import Contestant, Figures
from benchmarks.pipeline.real import timed
from benchmarks.tensor import torch_tensor
from benchmarks.tensor.torch_tensor import Batch, Training
from ganglion import Plan, RunSettings, parallelize
from ganglion.execute.comm import torch_world
from ganglion.execute.measure.memory import keep_freed_memory
from ganglion.execute.models import cross_entropy
from ganglion.execute.tensor import TensorSettings

NUM_RANKS = 2
KEEP = TensorSettings(keep_gathered=True)
Turn = Callable[[], Figures]
# What fp32 sums in another order may differ by, of the loss.
FIRST_TOLERANCE, SECOND_TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True)
class RealTask:
    """The model, the microbatches of one of two ranks, and how many steps a turn times."""

    model: Task
    steps: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return NUM_RANKS * self.model.tokens


FULL = RealTask(data_parallel.FULL)
QUICK = RealTask(Task(layers=2, hidden=128, seq_len=64, vocab_size=1024))


def global_batch(task: Task) -> Batch:
    """Return the same batch on every rank of every contestant."""
    size = (NUM_RANKS * task.microbatch_size * task.num_microbatches, task.seq_len + 1)
    ids = torch.randint(task.vocab_size, size, generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def half_batch(task: Task) -> Batch:
    """Return this rank's rows of the batch."""
    inputs, targets = (part.chunk(NUM_RANKS)[dist.get_rank()] for part in global_batch(task))
    return inputs, targets


def turn_of(losses: Iterator[float], task: RealTask) -> Turn:
    """Take the two steps whose losses are compared; return what times the following ones."""
    first, second = next(losses), next(losses)
    return lambda: {**timed(losses, task.steps), "first_loss": first, "second_loss": second}


def build_ganglion(axis: str, settings: TensorSettings | None, task: RealTask) -> Turn:
    model = task.model
    splits_rows = axis == "z"
    size = model.microbatch_size * (1 if splits_rows else NUM_RANKS)
    plan = Plan(**{axis: NUM_RANKS}, microbatch_size=size, num_microbatches=model.num_microbatches)
    run = parallelize(
        make_model(model),
        cross_entropy,
        make_optimizer,
        plan,
        RunSettings(max_grad_norm=MAX_GRAD_NORM, tensor=settings),
        world=torch_world(dist.get_rank(), plan.mesh(), timeout_s=300),
    )
    batch = half_batch(model) if splits_rows else global_batch(model)
    steps = run.steps(itertools.repeat(batch))
    return turn_of((result.loss for result in steps), task)


def build_peer(make: Callable[..., Training], splits_rows: bool, task: RealTask) -> Turn:
    model = task.model
    training = make(make_model(model), make_optimizer, MAX_GRAD_NORM)
    size = model.microbatch_size * (1 if splits_rows else NUM_RANKS)
    batch = half_batch(model) if splits_rows else global_batch(model)
    return turn_of(training.steps(batch, size), task)


def build_ideal(task: RealTask) -> Turn:
    keep_freed_memory()
    return build_peer(torch_tensor.plain, True, task)


CONTESTANTS = [
    Contestant("ideal", NUM_RANKS, build_ideal),
    Contestant("x2", NUM_RANKS, partial(build_ganglion, "x", None), ratio_to="dtensor_tp"),
    Contestant("dtensor_tp", NUM_RANKS, partial(build_peer, torch_tensor.dtensor_tp, False)),
    Contestant("z2", NUM_RANKS, partial(build_ganglion, "z", None), ratio_to="fsdp2"),
    Contestant("fsdp2", NUM_RANKS, partial(build_peer, partial(torch_tensor.fsdp2, False), True)),
    Contestant("z2_keep", NUM_RANKS, partial(build_ganglion, "z", KEEP), ratio_to="fsdp2_keep"),
    Contestant(
        "fsdp2_keep", NUM_RANKS, partial(build_peer, partial(torch_tensor.fsdp2, True), True)
    ),
]


def compared_losses(
    figures: Mapping[str, Sequence[Sequence[Figures]]],
) -> dict[str, tuple[float, float]]:
    """Return the losses of the first two steps by name; refuse to compare unequal trainings.

    `ideal` has nobody to agree with after its first update.
    """
    losses = {
        name: (_mean(turns[0], "first_loss"), _mean(turns[0], "second_loss"))
        for name, turns in figures.items()
    }
    peer_first, peer_second = losses["fsdp2"]
    for name, (first, second) in losses.items():
        same = math.isclose(first, peer_first, rel_tol=FIRST_TOLERANCE)
        if name != "ideal":
            same = same and math.isclose(second, peer_second, rel_tol=SECOND_TOLERANCE)
        if not same:
            raise RuntimeError(f"{name} does not train like fsdp2; losses of 2 steps: {losses}")
    return losses


def _mean(turn: Sequence[Figures], key: str) -> float:
    return statistics.mean(said[key] for said in turn)
