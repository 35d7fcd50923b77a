"""Part `wall` of the averaging benchmark: the real methods, with messages at the frozen price.

Four processes are workers and a fifth is the server, if a method has one. Weights of LeNet's size
are really exchanged and updated by ElasticAverage. Two things are slept for: a pass, so that four
workers fit on two cores, and a message, by whoever carries it (delay.py).

All sleeps are those of part `paper` times one factor, which makes a pass `pass_s` long: sleeps are
late by a tenth of a millisecond, which shall not matter. Updates take the time they take. The
simulation beside a row has the same sleeps, passes that vary alike, and the updates as measured.

Original EASGD lets one worker compute at a time; in the library's mode "round_robin" all compute,
and the server goes by number. So a worker of `original_easgd` waits for a token before its pass,
which the one before sends after its step; `round_robin` is the mode without tokens.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.averaging.delay import Carrier, HostCopies, SlowMemory, slow_world
from benchmarks.averaging.paper import JITTER, ORIGINAL, SYNC_3
from benchmarks.averaging.training import MOMENTUM, make_model
from benchmarks.averaging.wall_server import OwnServer, ServerJob, launch_environment
from benchmarks.harness import Contestant, Figures, measure_figures, spread
from ganglion.decide.simulator.averaging.costs import AveragingCosts, MessagePrice, jittered
from ganglion.decide.simulator.averaging.methods import METHODS
from ganglion.decide.simulator.averaging.result import COMMUNICATION, AveragingSimulation
from ganglion.decide.simulator.averaging.simulate import simulate_averaging
from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.hogwild import HogwildEasgd, HogwildSgd
from ganglion.execute.comm import World, torch_world

NUM_WORKERS = 4
BETA, LR = 0.9, 0.05
TIMEOUT_S = 60.0
PREFIX = "wall_"
# The first optimizer imports torch._dynamo.
PRELOADED = (
    "benchmarks.averaging.wall_server",
    "benchmarks.averaging.paper",
    "rich.table",
    "torch._dynamo",
)


@dataclass(frozen=True)
class WallTask:
    """How long a pass is slept for, and how many steps of each worker are timed."""

    pass_s: float
    steps: int


FULL, QUICK = WallTask(pass_s=0.05, steps=8), WallTask(pass_s=0.01, steps=2)


@dataclass(frozen=True)
class Way:
    """One row: the arguments of ElasticAverage, and the simulated method beside it."""

    name: str
    simulated: str
    options: Mapping[str, Any]
    is_packed: bool | None = None  # as the simulated method has it
    overlaps: bool | None = None  # the same
    takes_turns: bool = False
    momentum: float = 0.0  # of the workers' optimizer
    votes_are_free: bool = False
    note: str = ""

    @property
    def has_server(self) -> bool:
        return "servers" in self.options

    def num_parts(self, costs: AveragingCosts) -> int:
        """Return how many messages carry the weights."""
        packed = METHODS[self.simulated].is_packed if self.is_packed is None else self.is_packed
        return costs.num_parts(packed)


ELASTIC = {"beta": BETA, "tau": 1}
SERVED = {"servers": 1, "timeout_s": TIMEOUT_S}
IN_TURN = {"mode": "round_robin", **ELASTIC, **SERVED}
TREE = {"deterministic": True, "timeout_s": TIMEOUT_S}
ROOT = {**ELASTIC, **TREE, "center": "root"}
BY_LAYER = "weights travel in one block, which costs as much as a message for each tensor"
IN_MEMORY = "no messages: a read and an addition cost one each, between backward and step"
VOTED = "votes on an exchange are messages, too, which the simulator does not have"
COPIED = "copies to the host and back are sleeps"
FREE = "votes cost nothing"
SYNC_1 = {**ROOT, "center": "host_root", "overlap": False}
SYNC_2 = {**ROOT, "overlap": False}
WAYS = (
    Way(ORIGINAL, ORIGINAL, IN_TURN, takes_turns=True, note=BY_LAYER),
    Way(
        "original_easgd_no_overlap",
        "original_easgd_no_overlap",
        {**IN_TURN, "overlap": False},
        takes_turns=True,
        note=BY_LAYER,
    ),
    Way("original_easgd_packed", ORIGINAL, IN_TURN, is_packed=True, takes_turns=True),
    Way("round_robin", "async_easgd", IN_TURN, is_packed=False, note=BY_LAYER),
    Way("async_sgd", "async_sgd", {"mode": "async_sgd", "tau": 1, **SERVED}),
    Way(
        "async_msgd",
        "async_msgd",
        {"mode": "async_sgd", "tau": 1, "center_momentum": MOMENTUM, **SERVED},
    ),
    Way("hogwild_sgd", "hogwild_sgd", {"mode": "hogwild_sgd", "tau": 1}, note=IN_MEMORY),
    Way("async_easgd", "async_easgd", {"mode": "async", **ELASTIC, **SERVED}),
    Way(
        "async_measgd",
        "async_measgd",
        {"mode": "async", **ELASTIC, **SERVED},
        momentum=MOMENTUM,
    ),
    Way(
        "hogwild_easgd",
        "hogwild_easgd",
        {"mode": "hogwild", **ELASTIC},
        overlaps=False,
        note=f"{IN_MEMORY}, simulated so",
    ),
    Way("sync_sgd", "sync_sgd", {"mode": "sync_sgd", "reduction": "sum", **TREE}),
    Way("sync_easgd_1", "sync_easgd_1", SYNC_1, note=f"{VOTED}; {COPIED}"),
    Way(
        "sync_easgd_1_free_votes",
        "sync_easgd_1",
        SYNC_1,
        votes_are_free=True,
        note=f"{FREE}; {COPIED}",
    ),
    Way("sync_easgd_2", "sync_easgd_2", SYNC_2, note=VOTED),
    Way("sync_easgd_2_free_votes", "sync_easgd_2", SYNC_2, votes_are_free=True, note=FREE),
    Way(SYNC_3, SYNC_3, ROOT, note=VOTED),
)


@dataclass(frozen=True)
class WallRow:
    """One method on the wall clock, and on the simulated one; times are scaled alike."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    ratio_to: str | None
    ratio: float | None  # batches a second on the wall, over those of original_easgd
    simulated: float
    simulated_ratio: float  # the same on the simulated clock
    to_simulated: float  # wall over simulated time, the median over rounds
    communication_share: float
    simulated_share: float
    cpu: float  # processor time of the workers, ms a batch: what is really done
    note: str
    values: list[float] = field(default_factory=list)


# --- the clock -----------------------------------------------------------------------------------


def scaled(costs: AveragingCosts, pass_s: float) -> AveragingCosts:
    """Return prices at which a pass takes `pass_s`; batches are there, updates stay as they are."""
    assert isinstance(costs.pass_s, float), "the same for all, until it is varied"
    factor = pass_s / costs.pass_s
    link = MessagePrice(factor * costs.host_link.message_s, factor * costs.host_link.byte_s)
    return replace(costs, pass_s=pass_s, host_link=link, device_link=link, batch_bytes=0)


def passes(costs: AveragingCosts, seed: int) -> Callable[[int, int], float]:
    """Return the seconds of a pass by worker and step: the same for sleeps and simulation."""
    assert isinstance(costs.pass_s, float), "the same for all, until it is varied"
    return jittered(costs.pass_s, JITTER, seed)


def simulated(way: Way, costs: AveragingCosts, steps: int, seed: int) -> AveragingSimulation:
    """Return what the simulator makes of a row."""
    return simulate_averaging(
        way.simulated,
        replace(costs, pass_s=passes(costs, seed)),
        num_workers=NUM_WORKERS,
        num_batches=NUM_WORKERS * steps,
        is_packed=way.is_packed,
        overlaps=way.overlaps,
    )


# --- one worker ----------------------------------------------------------------------------------


class SleepingNet(nn.Module):
    """LeNet's weights, whose pass is a sleep and whose gradient is the weights themselves."""

    def __init__(self, pass_of: Callable[[int], float]) -> None:
        super().__init__()
        self._inner = make_model(0)
        self._pass_of = pass_of

    def forward(self, step: int) -> None:
        begin_s = time.perf_counter()
        for parameter in self.parameters():
            parameter.grad = parameter.detach().clone()
        time.sleep(max(0.0, self._pass_of(step) - (time.perf_counter() - begin_s)))


class Turns:
    """A token that goes round the workers, if they take turns."""

    def __init__(self, is_used: bool, num_steps: int) -> None:
        self._is_used, self._last = is_used, num_steps - 1
        self._rank, self._token = dist.get_rank(), torch.zeros(1)

    def begin(self, step: int) -> None:
        if self._is_used and (self._rank, step) != (0, 0):
            dist.recv(self._token, (self._rank - 1) % NUM_WORKERS)

    def end(self, step: int) -> None:
        if self._is_used and (self._rank, step) != (NUM_WORKERS - 1, self._last):
            dist.send(self._token, (self._rank + 1) % NUM_WORKERS)


class Trial:
    """One row in one worker and one round: from the first weights to the figures."""

    def __init__(
        self, way: Way, costs: AveragingCosts, seed: int, world: World, server: OwnServer
    ) -> None:
        self._way, self._server = way, server
        pass_of, rank = passes(costs, seed), dist.get_rank()
        self._model = SleepingNet(lambda step: pass_of(rank, step))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LR, momentum=way.momentum)
        self._carrier = Carrier(
            costs.host_link, way.num_parts(costs), small_are_free=way.votes_are_free
        )
        self._average = self._served(costs) if way.has_server else self._together(world)

    def run(self, steps: int) -> Figures:
        """Train, and tell the time of all workers and how much of it was communication."""
        with self._average:
            self._train(1)  # memory is touched and everybody known
        before = dict(self._average.metrics().seconds)
        dist.barrier()
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        with self._average:
            self._train(steps)
            own_end_s, cpu_s = time.monotonic(), time.process_time() - begin_cpu_s
        end_s = _latest(own_end_s)
        after = self._average.metrics().seconds
        spent = {name: after[name] - before[name] for name in after}
        assert all(bool(p.isfinite().all()) for p in self._model.parameters()), self._way.name
        self._average.close()
        share = self._share(spent, begin_s, end_s, own_end_s)
        figures = {"s": end_s - begin_s, "share": share, "cpu_s": cpu_s}
        return {f"{self._way.name} {what}": figure for what, figure in figures.items()}

    def _train(self, steps: int) -> None:
        turns = Turns(self._way.takes_turns, steps)
        for step in range(steps):
            turns.begin(step)
            self._model(step)
            self._optimizer.step()
            turns.end(step)

    def _served(self, costs: AveragingCosts) -> ElasticAverage:
        """Join a centre of the server process, as if a launcher had started all five."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True) if dist.get_rank() == 0 else None
        port = torch.tensor([store.port if store else 0])
        dist.broadcast(port, 0)
        places = [launch_environment(r, NUM_WORKERS + 1, int(port)) for r in range(NUM_WORKERS + 1)]
        if store is not None:
            num_parts = self._way.num_parts(costs)
            job = ServerJob(places[-1], self._way.options, costs.host_link, num_parts)
            self._server.begin(job)
        os.environ.update(places[dist.get_rank()])
        self._store = store  # kept until all have left
        return ElasticAverage(self._model, self._optimizer, **self._way.options)

    def _together(self, world: World) -> ElasticAverage:
        """Join the others, whose messages, copies or memory are slow."""
        slow = slow_world(world, self._carrier)
        average = ElasticAverage(self._model, self._optimizer, world=slow, **self._way.options)
        # Neither has a group or a transport in between that could be given from outside.
        method: Any = average._method
        if isinstance(method, HogwildEasgd | HogwildSgd):
            method._shared = SlowMemory(method._shared, self._carrier)
        elif self._way.options.get("center") == "host_root":
            method._center = HostCopies(method._center, self._carrier, method._meter)
        return average

    def _share(
        self, spent: dict[str, float], begin_s: float, end_s: float, own_end_s: float
    ) -> float:
        """Return the share of communication: of the host where it takes all turns, else of this."""
        if self._way.has_server and dist.get_rank() == 0:
            carried_s = self._server.carried_s(begin_s, end_s)
            if self._way.takes_turns:
                return carried_s / (end_s - begin_s)
        # A centre that adds while its worker works on takes a little from earlier waits.
        told_s = max(0.0, sum(spent[name] for name in COMMUNICATION))
        if self._way.options.get("mode") in ("hogwild", "hogwild_sgd"):  # to them it is an update
            told_s += self._carrier.carried_s(begin_s, own_end_s)
        return told_s / (own_end_s - begin_s)


def _latest(moment_s: float) -> float:
    """Return the latest of all workers' moments."""
    moments = torch.tensor([moment_s], dtype=torch.float64)
    dist.all_reduce(moments, dist.ReduceOp.MAX)
    return float(moments)


def build(task: WallTask, costs: AveragingCosts, server: OwnServer) -> Callable[[], Figures]:
    """Return a turn that runs every row once; its number is the seed of the passes."""
    world = torch_world(dist.get_rank(), Mesh(data=NUM_WORKERS), timeout_s=TIMEOUT_S)
    seeds = itertools.count()

    def turn() -> Figures:
        seed = next(seeds)
        figures: dict[str, float] = {}
        for way in WAYS:
            figures.update(Trial(way, costs, seed, world, server).run(task.steps))
        return figures

    return turn


# --- rows ----------------------------------------------------------------------------------------


def wall_rows(task: WallTask, costs: AveragingCosts, rounds: int) -> list[WallRow]:
    """Measure every row in interleaved rounds, and simulate it with the same passes."""
    costs = scaled(costs, task.pass_s)
    server = OwnServer.start(PRELOADED, TIMEOUT_S)
    contestants = [Contestant("wall", NUM_WORKERS, build)]
    turns = measure_figures(
        contestants, (task, costs, server), rounds, 0, preloaded=PRELOADED, title="wall"
    )["wall"]
    return [_row(way, task, costs, turns) for way in WAYS]


def _row(
    way: Way, task: WallTask, costs: AveragingCosts, turns: Sequence[Sequence[Figures]]
) -> WallRow:
    told = [turn[0] for turn in turns]  # worker 0 tells the time of all
    batch_ms = 1e3 / (NUM_WORKERS * task.steps)
    walls = [batch_ms * turn[f"{way.name} s"] for turn in told]
    original = [batch_ms * turn[f"{ORIGINAL} s"] for turn in told]
    done = [simulated(way, costs, task.steps, seed) for seed in range(len(told))]
    beside = [1e3 * one.batch_s for one in done]
    peer = [1e3 * simulated(WAYS[0], costs, task.steps, s).batch_s for s in range(len(told))]
    middle, is_first = statistics.median, way.name == ORIGINAL
    value, low, high = spread(walls)
    return WallRow(
        *(PREFIX + way.name, value, "ms a batch", low, high),
        ratio_to=None if is_first else PREFIX + ORIGINAL,
        ratio=None if is_first else middle(a / b for a, b in zip(original, walls, strict=True)),
        simulated=middle(beside),
        simulated_ratio=middle(a / b for a, b in zip(peer, beside, strict=True)),
        to_simulated=middle(a / b for a, b in zip(walls, beside, strict=True)),
        communication_share=middle(turn[f"{way.name} share"] for turn in told),
        simulated_share=middle(one.communication_share for one in done),
        cpu=batch_ms * middle(sum(said[f"{way.name} cpu_s"] for said in turn) for turn in turns),
        note=way.note,
        values=walls,
    )
