"""Parts `ddp` and `packing` of the averaging benchmark: two real processes with one thread each.

`ddp`: LeNet on Fashion-MNIST, the same batches, optimizer and falling rate for both; a turn trains
from the start, and its seed is its number, so accuracies after equal samples are pairs.
`packing`: exchanges of the same weights, cut into more and more tensors, in one message or in one
for each tensor; nothing is computed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.averaging.training import Images, load_images, make_model
from benchmarks.harness import Contestant, Figures, measure_figures, spread
from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.comm import World, torch_world

NUM_RANKS = 2
TAU = 10
BETA = 0.9
MOMENTUM = 0.9
TIMEOUT_S = 300.0
EASGD, DDP, ALONE = "sync_easgd_tau_10", "torch_ddp", "two_alone"
# The first optimizer imports torch._dynamo.
PRELOADED = (
    "ganglion.execute.averaging.average",
    "benchmarks.averaging.training",
    "rich.table",
    "torch._dynamo",
)
Turn = Callable[[], Figures]


@dataclass(frozen=True)
class DdpTask:
    """What a turn trains; each side has the rate of a grid that suits it best."""

    steps: int = 9380  # 10 epochs
    batch_size: int = 32
    lr: float = 0.03
    elastic_lr: float = 0.05
    num_held_out: int | None = None
    num_train: int | None = None
    source: str = "fashion-mnist"


@dataclass(frozen=True)
class PackingTask:
    """The weights that are exchanged, and how they are cut."""

    num_elements: int = 262_144
    counts: tuple[int, ...] = (1, 4, 16, 64, 256)
    exchanges: int = 30


FULL_DDP = DdpTask()
QUICK_DDP = DdpTask(steps=40, num_train=4000, num_held_out=1000)
FULL_PACKING, QUICK_PACKING = PackingTask(), PackingTask(counts=(1, 16, 64), exchanges=5)


@dataclass(frozen=True)
class RealRow:
    """One contestant of two real processes."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    ratio_to: str | None
    ratio: float | None
    part: str
    accuracy: float | None = None  # in percent, the mean over turns
    accuracy_gap: float | None = None  # points to torch_ddp, the mean over pairs; above 0 is better
    accuracy_behind: float | None = None  # the same, the other way round: at most 0.3 is aimed at
    accuracy_gaps: tuple[float, ...] = ()
    cpu_s: float | None = None  # processor seconds of a turn, both ranks together
    tensors: int | None = None


def open_pair() -> World:
    """Return the world of the two processes that the harness started."""
    return torch_world(dist.get_rank(), Mesh(data=NUM_RANKS), timeout_s=TIMEOUT_S)


# --- ddp -----------------------------------------------------------------------------------------


def batches(images: Images, task: DdpTask, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's batches: the ranks share one shuffle of the samples."""
    draw = torch.Generator().manual_seed(seed)
    pixels, labels = images
    needed = task.steps * task.batch_size * NUM_RANKS
    epochs = -(-needed // len(labels))
    order = torch.cat([torch.randperm(len(labels), generator=draw) for _ in range(epochs)])
    mine = order[:needed].view(task.steps, NUM_RANKS, task.batch_size)[:, dist.get_rank()]
    return [(pixels[chosen], labels[chosen]) for chosen in mine]


class Trial:
    """One training of a turn: the model and what trains it, the same for all contestants."""

    def __init__(self, task: DdpTask, lr: float, images: Images, seed: int) -> None:
        self.model = make_model(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=MOMENTUM)
        self._falling = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.02, task.steps)
        self._batches = batches(images, task, seed)

    def train(self, model: nn.Module) -> Figures:
        """Train `model`, which is or wraps this trial's; return the seconds of it."""
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for x, y in self._batches:
            F.cross_entropy(model(x), y).backward()
            self.optimizer.step()
            self._falling.step()
            self.optimizer.zero_grad()
        cpu_s = time.process_time() - start_cpu_s
        return {"train_s": time.perf_counter() - start_s, "cpu_s": cpu_s}

    @torch.no_grad()
    def accuracy(self, held_out: Images) -> float:
        """Return the percentage of `held_out` that is classified right."""
        self.model.eval()
        return 100 * float((self.model(held_out[0]).argmax(1) == held_out[1]).float().mean())


def build_trial(run: Callable[[Trial, Images, World], Figures], task: DdpTask) -> Turn:
    """Return a turn that trains from the start, with a seed of its own."""
    world = open_pair()
    lr = task.elastic_lr if run is elastic else task.lr
    images = load_images(task.source, "train", task.num_train)
    held_out = load_images(task.source, "t10k", task.num_held_out)
    seeds = itertools.count()
    return lambda: run(Trial(task, lr, images, next(seeds)), held_out, world)


def elastic(trial: Trial, held_out: Images, world: World) -> Figures:
    """Train with Sync EASGD, and look at the centre."""
    average = ElasticAverage(trial.model, trial.optimizer, beta=BETA, tau=TAU, world=world)
    with average:
        taken = trial.train(trial.model)
    with average.center_weights():
        accuracy = trial.accuracy(held_out)
    average.close()
    return {**taken, "accuracy": accuracy}


def data_parallel(trial: Trial, held_out: Images, world: World) -> Figures:
    """Train with torch's own data parallelism."""
    taken = trial.train(DistributedDataParallel(trial.model))
    return {**taken, "accuracy": trial.accuracy(held_out)}


def alone(trial: Trial, held_out: Images, world: World) -> Figures:
    """Train without ever talking: what communication can be compared with."""
    taken = trial.train(trial.model)
    return {**taken, "accuracy": trial.accuracy(held_out)}


DDP_CONTESTANTS = [
    Contestant(EASGD, NUM_RANKS, partial(build_trial, elastic), ratio_to=DDP),
    Contestant(DDP, NUM_RANKS, partial(build_trial, data_parallel)),
    Contestant(ALONE, NUM_RANKS, partial(build_trial, alone), ratio_to=DDP),
]


def ddp_rows(task: DdpTask, rounds: int) -> list[RealRow]:
    """Measure samples a second, and accuracy after as many samples."""
    return trial_rows("ddp", DDP_CONTESTANTS, task, rounds)


def trial_rows(
    part: str, contestants: Sequence[Contestant], task: DdpTask, rounds: int
) -> list[RealRow]:
    """Let contestants train on the same samples, and compare each with its peer."""
    figures = measure_figures(
        contestants, (task,), rounds, warm_ups=0, preloaded=PRELOADED, title=part
    )
    samples = task.steps * task.batch_size * NUM_RANKS
    rates = {
        name: [samples / max(said["train_s"] for said in turn) for turn in turns]
        for name, turns in figures.items()
    }
    found = {name: [turn[0]["accuracy"] for turn in turns] for name, turns in figures.items()}
    rows = [_trial_row(part, contestant, rates, found) for contestant in contestants]
    return [replace(row, cpu_s=_cpu_s(figures[row.name])) for row in rows]


def _cpu_s(turns: Sequence[Sequence[Figures]]) -> float:
    return statistics.median(sum(said["cpu_s"] for said in turn) for turn in turns)


def _trial_row(
    part: str,
    contestant: Contestant,
    rates: Mapping[str, Sequence[float]],
    found: Mapping[str, Sequence[float]],
) -> RealRow:
    name, peer = contestant.name, contestant.ratio_to
    value, low, high = spread(rates[name])
    row = RealRow(
        *(name, value, "samples/s", low, high),
        ratio_to=None,
        ratio=None,
        part=part,
        accuracy=statistics.mean(found[name]),
    )
    if peer is None:
        return row
    gaps = tuple(a - b for a, b in zip(found[name], found[peer], strict=True))
    return replace(
        row,
        ratio_to=peer,
        ratio=value / statistics.median(rates[peer]),
        accuracy_gap=statistics.mean(gaps),
        accuracy_behind=-statistics.mean(gaps),
        accuracy_gaps=gaps,
    )


# --- packing -------------------------------------------------------------------------------------


def build_exchange(is_packed: bool, task: PackingTask) -> Turn:
    """Return a turn that only exchanges, with the weights cut in all the ways of the task."""
    world = open_pair()
    averages = {count: _average(count, is_packed, task, world) for count in task.counts}

    def turn() -> Figures:
        return {str(count): _exchange_s(a, task.exchanges) for count, a in averages.items()}

    return turn


def _average(num_tensors: int, is_packed: bool, task: PackingTask, world: World) -> ElasticAverage:
    size = task.num_elements // num_tensors
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(num_tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"beta": BETA, "tau": 1, "overlap": False, "pack": is_packed}
    return ElasticAverage(model, optimizer, world=world, **options)


def _exchange_s(average: ElasticAverage, num_exchanges: int) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(num_exchanges):
        average.sync_now()
    return time.perf_counter() - start_s


PACKED, APART = "packed", "apart"
PACKING_CONTESTANTS = [
    Contestant(PACKED, NUM_RANKS, partial(build_exchange, True), ratio_to=APART),
    Contestant(APART, NUM_RANKS, partial(build_exchange, False)),
]


def packing_rows(task: PackingTask, rounds: int) -> list[RealRow]:
    """Measure exchanges a second, packed and tensor by tensor, over the number of tensors."""
    figures = measure_figures(
        PACKING_CONTESTANTS, (task,), rounds, preloaded=PRELOADED, title="packing"
    )
    return [
        _packing_row(contestant, count, task, figures)
        for count in task.counts
        for contestant in PACKING_CONTESTANTS
    ]


def _packing_row(
    contestant: Contestant,
    count: int,
    task: PackingTask,
    figures: Mapping[str, Sequence[Sequence[Figures]]],
) -> RealRow:
    rates = {
        name: [task.exchanges / max(said[str(count)] for said in turn) for turn in turns]
        for name, turns in figures.items()
    }
    value, low, high = spread(rates[contestant.name])
    peer = contestant.ratio_to
    return RealRow(
        *(f"{contestant.name}_{count}", value, "exchanges/s", low, high),
        ratio_to=f"{peer}_{count}" if peer else None,
        ratio=value / statistics.median(rates[peer]) if peer else None,
        part="packing",
        tensors=count,
    )
