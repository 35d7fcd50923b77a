"""Part `paper` of the averaging benchmark: LeNet on Fashion-MNIST, 4 workers, a virtual clock.

The clock (ganglion/decide/simulator/averaging/simulate.py) says when who exchanges;
training.py does the arithmetic in that order. Passes and updates have the time they take
alone on this machine; each pass varies by 2 %. One price of messages is chosen so that
original_easgd, layer by layer, communicates 87 % of its time, and is the price of all methods.

Rates: `same` is the rate of the grid at which sync_easgd_3 needs the fewest batches with seed 0,
for all methods; `tuned` is each method's own best. Trainings with momentum use 0.9. A seed decides
the weights, the batches and the passes, so methods are compared seed by seed.

A method that does not get to the target within `max_batches` is told with the time of all of them.
Ratios to it are then bounds from below, and its own ratios are 0.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.averaging.training import (
    Gradients,
    Images,
    Setting,
    accuracies,
    load_images,
    make_model,
)
from benchmarks.harness import spread
from ganglion.decide.simulator.averaging.costs import AveragingCosts, MessagePrice, jittered
from ganglion.decide.simulator.averaging.result import PUSH, STEP, AveragingSimulation
from ganglion.decide.simulator.averaging.simulate import calibrated, simulate_averaging
from ganglion.execute.averaging.methods.method import elastic_force

SHARE = 0.87  # of original_easgd, table 3 of the paper
# A message of this size takes twice as long as an empty one: what table 3 gives for 8 messages of
# 1.7 MB together (3.5 ms) against packed ones (0.35 to 0.58 ms).
HALF_BYTES = 4e6
JITTER = 0.02
TIMED_PASSES = 40
HOPELESS, HOPELESS_SHARE = 0.15, 1 / 4  # no better than guessing after a quarter of the batches

ORIGINAL, SYNC_3 = "original_easgd", "sync_easgd_3"
PACKED = "original_easgd_packed"
# Rows in order, and the method that does the same arithmetic at other times.
ROWS: Mapping[str, str] = {
    ORIGINAL: ORIGINAL,
    "original_easgd_no_overlap": ORIGINAL,
    PACKED: ORIGINAL,
    "async_sgd": "async_sgd",
    "async_msgd": "async_msgd",
    "hogwild_sgd": "hogwild_sgd",
    "async_easgd": "async_easgd",
    "async_measgd": "async_measgd",
    "hogwild_easgd": "hogwild_easgd",
    "sync_sgd": "sync_sgd",
    "sync_easgd_1": SYNC_3,
    "sync_easgd_2": SYNC_3,
    SYNC_3: SYNC_3,
    "sync_measgd_3": "sync_measgd_3",  # not in the paper: with the momentum of async_measgd
}
PEERS = {"async_easgd": "async_sgd", "async_measgd": "async_msgd", "hogwild_easgd": "hogwild_sgd"}


@dataclass(frozen=True)
class PaperTask:
    """How much is trained, and until when."""

    target: float = 0.70
    max_batches: int = 1600
    watch_every: int = 100
    num_train: int | None = None
    num_held_out: int = 1000
    lrs: tuple[float, ...] = (0.0125, 0.05, 0.1, 0.2, 0.4)
    seeds: int = 3
    batch_size: int = 16
    beta: float = 0.9
    num_workers: int = 4
    source: str = "fashion-mnist"


FULL = PaperTask()
QUICK = PaperTask(target=0.65, max_batches=1200, num_train=12000, lrs=(0.2,), seeds=1)


@dataclass(frozen=True)
class PaperRow:
    """One method with one choice of rates; times are of the virtual clock unless they say wall."""

    name: str
    value: float  # seconds to the target
    unit: str
    low: float
    high: float
    ratio_to: str | None
    ratio: float | None  # how many times faster, the median over seeds
    to_original: float
    to_first: float  # the fastest method's time over this one's
    throughput: float  # batches a second, over those of original_easgd
    statistical: float  # batches that original_easgd needed, over those this one did
    lr: float
    batches: float
    batch_s: float
    reached: int
    seeds: int
    communication_share: float
    shares: dict[str, float]
    staleness: float
    wall_s: float
    ratios: list[float] = field(default_factory=list)


# --- the clock -----------------------------------------------------------------------------------


def measured_costs(task: PaperTask) -> AveragingCosts:
    """Return what passes and updates take alone, and the price of messages."""
    gradients = Gradients(load_images(task.source, "train", 1000), _setting(task, 0.1, 0))
    worker = gradients.initial.clone()
    center = worker.clone()

    def update() -> None:
        force = elastic_force(worker, center, 0.1)
        worker.sub_(worker, alpha=1e-9).sub_(force)

    center_s = _least_s(lambda: center.add_(elastic_force(worker, center, 0.1)))
    costs = AveragingCosts(
        pass_s=_least_s(lambda: gradients.at(worker, 0)),
        update_s=_least_s(update),
        host_center_s=center_s,
        device_center_s=center_s,
        tensor_bytes=tuple(4 * p.numel() for p in make_model(0).parameters()),
        batch_bytes=4 * 28 * 28 * task.batch_size,
    )
    return calibrated(costs, SHARE, num_workers=task.num_workers, half_bytes=HALF_BYTES)


def _least_s(do: Callable[[], object]) -> float:
    """Return the least processor time of many: that of a machine which does nothing else."""
    taken = []
    for _ in range(TIMED_PASSES):
        start_s = time.process_time()
        do()
        taken.append(time.process_time() - start_s)
    return min(taken)


def simulated(name: str, costs: AveragingCosts, task: PaperTask, seed: int) -> AveragingSimulation:
    """Return a row's method on the clock, with passes that vary."""
    assert isinstance(costs.pass_s, float)
    return simulate_averaging(
        ORIGINAL if name == PACKED else name,
        replace(costs, pass_s=jittered(costs.pass_s, JITTER, seed)),
        num_workers=task.num_workers,
        num_batches=task.max_batches,
        is_packed=True if name == PACKED else None,
    )


def _setting(task: PaperTask, lr: float, seed: int) -> Setting:
    return Setting(lr, task.beta, task.batch_size, task.num_workers, seed)


# --- trainings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """The accuracy of the centre over batches; `wall_s` is what the arithmetic took."""

    points: list[tuple[int, float]]
    wall_s: float

    def batches_to(self, target: float) -> float | None:
        """Return the batches at which the mean of two points in a row passes the target."""
        middles = [
            ((n + m) / 2, (a + b) / 2)
            for (n, a), (m, b) in zip(self.points, self.points[1:], strict=False)
        ]
        for (n, a), (m, b) in zip([(0.0, 0.1), *middles], middles, strict=False):
            if b >= target:
                return m - (m - n) * (b - target) / max(b - a, 1e-9)
        return None


@lru_cache(maxsize=4)
def _images(source: str, part: str, num_samples: int | None) -> Images:
    return load_images(source, part, num_samples)


class Curves:
    """Trains what is asked for, once; finished trainings are kept in a file if there is one."""

    def __init__(self, task: PaperTask, results: Path | None) -> None:
        self.task, self._results = task, results
        self._known: dict[str, Curve] = {}
        lines = results.read_text().splitlines() if results and results.exists() else []
        records = [json.loads(line) for line in lines]
        kept = [record["costs"] for record in records if "costs" in record]
        # Orders of events depend on the times: a run that goes on has those it began with.
        self.costs = _costs_of(kept[0]) if kept else measured_costs(task)
        if not kept:
            self._keep({"costs": asdict(self.costs)})
        for record in records:
            if "key" in record:
                points = [(n, a) for n, a in record["points"]]
                self._known[record["key"]] = Curve(points, record["wall_s"])

    def get(self, method: str, lr: float, seed: int) -> Curve:
        """Return the curve of a method, training it if nobody has yet."""
        what = replace(self.task, lrs=(), seeds=0)
        key = json.dumps([method, lr, seed, asdict(what)])
        if key not in self._known:
            curve = self._known[key] = self._train(method, lr, seed)
            self._keep({"key": key, **asdict(curve)})
            last = curve.points[-1] if curve.points else None
            print(f"{method} lr {lr:g} seed {seed}: {last}", file=sys.stderr, flush=True)
        return self._known[key]

    def _train(self, method: str, lr: float, seed: int) -> Curve:
        task, start_s = self.task, time.perf_counter()
        events = simulated(method, self.costs, task, seed).events
        train = _images(task.source, "train", task.num_train)
        held_out = _images(task.source, "t10k", task.num_held_out)
        points: list[tuple[int, float]] = []
        setting = _setting(task, lr, seed)
        for point in accuracies(method, events, setting, train, held_out, task.watch_every):
            points.append(point)
            curve = Curve(points, time.perf_counter() - start_s)
            if curve.batches_to(task.target) is not None or self._is_hopeless(*point):
                break
        return Curve(points, time.perf_counter() - start_s)

    def _is_hopeless(self, num_batches: int, accuracy: float) -> bool:
        is_late = num_batches >= HOPELESS_SHARE * self.task.max_batches
        return is_late and accuracy < HOPELESS

    def _keep(self, record: Mapping[str, Any]) -> None:
        if self._results:
            with self._results.open("a") as file:
                file.write(json.dumps(record) + "\n")


def _costs_of(record: dict[str, Any]) -> AveragingCosts:
    links = {name: MessagePrice(**record[name]) for name in record if name.endswith("_link")}
    return AveragingCosts(**{**record, **links, "tensor_bytes": tuple(record["tensor_bytes"])})


# --- rows ----------------------------------------------------------------------------------------


def best_lr(curves: Curves, method: str) -> float:
    """Return the rate of the grid that needs the fewest batches with the first seed.

    Where none gets to the target, the one that got highest.
    """
    if len(curves.task.lrs) == 1:
        return curves.task.lrs[0]
    tried = {lr: curves.get(method, lr, 0) for lr in curves.task.lrs}

    def loss(lr: float) -> tuple[float, float]:
        batches = tried[lr].batches_to(curves.task.target)
        top = max((accuracy for _, accuracy in tried[lr].points), default=0.0)
        return (math.inf if batches is None else batches, -top)

    return min(tried, key=loss)


@dataclass(frozen=True)
class Outcome:
    """One row with one seed."""

    seconds: float
    batches: float
    is_reached: bool
    simulation: AveragingSimulation
    wall_s: float


def outcome(curves: Curves, name: str, lr: float, seed: int) -> Outcome:
    """Return when a row's method got to the target, or all of its time."""
    task = curves.task
    curve = curves.get(ROWS[name], lr, seed)
    simulation = simulated(name, curves.costs, task, seed)
    found = curve.batches_to(task.target)
    batches = task.max_batches if found is None else found
    seconds = time_of(simulation, batches)
    return Outcome(seconds, batches, found is not None, simulation, curve.wall_s)


def faster(ours: Outcome, peer: Outcome) -> float:
    """Return how many times faster than a peer; 0 if we never got there."""
    return peer.seconds / ours.seconds if ours.is_reached else 0.0


def time_of(simulation: AveragingSimulation, batches: float) -> float:
    """Return when that many batches were used."""
    times = [event.time_s for event in simulation.events if event.kind in (PUSH, STEP)]
    return times[max(0, min(len(times), round(batches)) - 1)]


def rows_of(curves: Curves, lrs: Mapping[str, float], ending: str) -> list[PaperRow]:
    """Return all rows, with the rate of each method."""
    seeds = range(curves.task.seeds)
    found = {name: [outcome(curves, name, lrs[ROWS[name]], s) for s in seeds] for name in ROWS}
    first = {
        s: min((o[s].seconds for o in found.values() if o[s].is_reached), default=0.0)
        for s in seeds
    }
    return [_row(name, found, first, lrs[ROWS[name]], ending) for name in ROWS]


def _row(
    name: str,
    found: Mapping[str, Sequence[Outcome]],
    first: Mapping[int, float],
    lr: float,
    ending: str,
) -> PaperRow:
    ours, original = found[name], found[ORIGINAL]
    peer = PEERS.get(name, ORIGINAL)
    ratios = [faster(a, b) for a, b in zip(ours, found[peer], strict=True)]
    middle = statistics.median
    pairs = list(zip(ours, original, strict=True))
    value, low, high = spread([a.seconds for a in ours])
    stale = ours[0].simulation.staleness
    return PaperRow(
        *(name + ending, value, "s", low, high),
        ratio_to=None if name == ORIGINAL else peer + ending,
        ratio=None if name == ORIGINAL else middle(ratios),
        to_original=middle(faster(a, b) for a, b in pairs),
        to_first=middle(first[s] / a.seconds * a.is_reached for s, a in enumerate(ours)),
        throughput=middle(b.simulation.batch_s / a.simulation.batch_s for a, b in pairs),
        statistical=middle(b.batches / a.batches * a.is_reached for a, b in pairs),
        lr=lr,
        batches=middle(a.batches for a in ours),
        batch_s=middle(a.simulation.batch_s for a in ours),
        reached=sum(a.is_reached for a in ours),
        seeds=len(ours),
        communication_share=middle(a.simulation.communication_share for a in ours),
        shares=ours[0].simulation.shares(),
        staleness=sum(s * n for s, n in stale.items()) / max(1, stale.total()),
        wall_s=middle(a.wall_s for a in ours),
        ratios=ratios,
    )


def paper_rows(task: PaperTask, results: Path | None) -> tuple[list[PaperRow], Curves]:
    """Train everything; return the rows of both choices of rates."""
    torch.set_num_threads(1)
    curves = Curves(task, results)
    methods = sorted(set(ROWS.values()))
    same = best_lr(curves, SYNC_3)
    rows = rows_of(curves, dict.fromkeys(methods, same), "")
    if len(task.lrs) > 1:
        tuned = {method: best_lr(curves, method) for method in methods}
        rows += rows_of(curves, tuned, "_tuned")
    return rows, curves
