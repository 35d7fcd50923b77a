"""Part `overlap` of the tensor benchmark: what overlap hides under a slow link, on 4 ranks.

The layers are those of a GPT, split over x = 2 and z = 2 by Ganglion's own engine; products sleep
for their share of the compute time, so that 4 ranks fit on 2 cores. A collective is due when its
bytes have passed a link, one link an axis, on which gathers and reduce-scatters queue:

    started        link free            due
    |--- queued ---|--- bytes / rate ---|       `wait` returns when it is due, and done

The rate is such that communication over compute is that of AxoNN-4D's own figure (2502.08145,
figure 5: GPT-80B on 8192 GCDs of Frontier), whose rows stand beside ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Contestant, Figures
from benchmarks.pipeline.real import timed
from ganglion.decide.costs import Matmul, Repeats, gpt_matmuls, ring_sent, tensor_traffic
from ganglion.decide.shapes import GPTShape
from ganglion.decide.topology import Mesh
from ganglion.execute.comm import Group, Handle, World, torch_world
from ganglion.execute.tensor import Grid, TensorSettings, Weights
from ganglion.execute.tensor.multiply import Layer, multiply
from ganglion.execute.tensor.products import Sizes

MESH = Mesh(x=2, z=2)
HEADS = 8


@dataclass(frozen=True)
class PaperRow:
    """Seconds a batch, digitised from the figure (the spec's part B.2)."""

    compute_s: float
    exposed_s: float


@dataclass(frozen=True)
class Way:
    """Which overlaps are on, and what the paper measured with them."""

    name: str
    paper: PaperRow
    settings: TensorSettings


def _settings(*, oar: bool, ors: bool, oag: bool) -> TensorSettings:
    return TensorSettings(
        overlap_all_reduce=oar, overlap_reduce_scatter=ors, overlap_all_gather=oag
    )


NONE = "overlap_none"
WAYS = (
    Way(NONE, PaperRow(11.83, 10.91), _settings(oar=False, ors=False, oag=False)),
    Way("overlap_oar", PaperRow(11.86, 10.37), _settings(oar=True, ors=False, oag=False)),
    Way("overlap_oar_ors", PaperRow(11.98, 9.28), _settings(oar=True, ors=True, oag=False)),
    Way("overlap_oar_ors_oag", PaperRow(12.38, 6.11), _settings(oar=True, ors=True, oag=True)),
)
PAPER_RATIO = WAYS[0].paper.exposed_s / WAYS[0].paper.compute_s


@dataclass(frozen=True)
class OverlapTask:
    """The layers, the compute time of a step, and how many steps a turn times.

    With so many `rows` a rank, two thirds of the bytes are those of weights.
    """

    steps: int
    compute_s: float
    num_layers: int = 4
    hidden: int = 128
    rows: int = 144

    def matmuls(self) -> list[Matmul]:
        shape = GPTShape(
            vocab_size=1,
            seq_len=1,
            num_layers=self.num_layers,
            hidden=self.hidden,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_size=self.hidden // HEADS,
            mlp_hidden=4 * self.hidden,
        )
        return gpt_matmuls(shape, self.rows * MESH.z)[:-1]  # without the head

    @property
    def bytes_per_s(self) -> float:
        """The rate of every link at which communication takes the paper's share."""
        moved = tensor_traffic(self.matmuls(), MESH, Repeats.of_step(1)) * 4
        return moved.total / (PAPER_RATIO * self.compute_s)

    def product_s(self, matmul: Matmul) -> float:
        """Return the time of one product; forward and the two of backward take as long each."""
        total = sum(each.inputs * each.outputs for each in self.matmuls())
        return self.compute_s / 3 * matmul.inputs * matmul.outputs / total


FULL = OverlapTask(steps=4, compute_s=0.6)
QUICK = OverlapTask(steps=1, compute_s=0.15, num_layers=2)


class SleepingProduct:
    """A product that takes its time and has zeros as results; `slept_s` says how long it took."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.slept_s = 0.0

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        self._sleep()
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        self._sleep()
        return torch.zeros_like(x)

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        self._sleep()
        return x.new_zeros(shape)

    def _sleep(self) -> None:
        start_s = time.perf_counter()
        time.sleep(self._seconds)
        self.slept_s += time.perf_counter() - start_s


# --- the slow link -----------------------------------------------------------------------------


class Link:
    """One rank's end of a link: what is sent waits for what was sent before."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def due_s(self, num_bytes: float) -> float:
        """Return when bytes that are sent now have passed."""
        self._free_s = max(self._free_s, time.perf_counter()) + num_bytes / self._bytes_per_s
        return self._free_s


class SlowHandle:
    """A started collective that ends when it is due."""

    def __init__(self, inner: Handle, due_s: float) -> None:
        self._inner = inner
        self._due_s = due_s
        self.started_s = inner.started_s
        self.finished_s: float | None = None

    def is_done(self) -> bool:
        return self._inner.is_done() and time.perf_counter() >= self._due_s

    def wait(self) -> None:
        self._inner.wait()
        time.sleep(max(0.0, self._due_s - time.perf_counter()))


class SlowGroup:
    """A group whose collectives pass a link; rings, so each rank sends its share of the bytes."""

    def __init__(self, inner: Group, link: Link) -> None:
        self._inner = inner
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        due_s = self._link.due_s(2 * ring_sent(tensor.nbytes, self._inner.size))
        return SlowHandle(self._inner.all_reduce(tensor, op), due_s)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        due_s = self._link.due_s(ring_sent(output.nbytes, self._inner.size))
        return SlowHandle(self._inner.all_gather(output, tensor), due_s)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum") -> Handle:
        due_s = self._link.due_s(ring_sent(tensor.nbytes, self._inner.size))
        return SlowHandle(self._inner.reduce_scatter(output, tensor, op), due_s)


def slow_world(world: World, bytes_per_s: float) -> World:
    """Return the same world with one slow link an axis, which all groups along it share."""
    links: dict[tuple[str, ...], Link] = {}
    made: list[tuple[str, ...]] = []

    def group_along(axes: tuple[str, ...]) -> Any:
        made.append(axes)
        link = links.setdefault(axes, Link(bytes_per_s))
        return SlowGroup(world.group(*axes, use=f"slow {made.count(axes)}"), link)

    return World(world.rank, world.mesh, group_along, carrier=world.carrier)


# --- contestants -------------------------------------------------------------------------------


class Stack:
    """The layers one after another; between them, features are only dropped to fit."""

    def __init__(self, task: OverlapTask, grid: Grid, weights: Weights) -> None:
        self.products = [SleepingProduct(task.product_s(each)) for each in task.matmuls()]
        pairs = zip(task.matmuls(), self.products, strict=True)
        self._layers = [_layer(*pair, grid, weights) for pair in pairs]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = multiply(x[:, : layer.weight.parameter.shape[1]], layer)
        return x

    def parameters(self) -> list[Tensor]:
        return [layer.weight.parameter for layer in self._layers]


def _layer(matmul: Matmul, product: SleepingProduct, grid: Grid, weights: Weights) -> Layer:
    in_axis, out_axis = ("x", "y") if matmul.transposed else ("y", "x")
    num_inputs = matmul.inputs // grid.size(in_axis)
    num_rows = matmul.outputs // (grid.size(out_axis) * grid.mesh.z)
    return Layer(
        product=product,
        weight=weights.store(nn.Parameter(torch.zeros(num_rows, num_inputs))),
        in_group=grid.group(in_axis),
        out_group=grid.group(out_axis),
        overlap=grid.settings.overlap_all_reduce,
    )


def build(way: Way, task: OverlapTask) -> Callable[[], Figures]:
    world = slow_world(torch_world(dist.get_rank(), MESH, timeout_s=120), task.bytes_per_s)
    grid = Grid(world, way.settings)
    weights = Weights(grid)
    stack = Stack(task, grid, weights)
    steps = _steps(stack, weights, torch.zeros(task.rows, task.hidden, requires_grad=True))
    next(steps)  # it learns the order of the gathers

    def turn() -> Figures:
        before_s = sum(product.slept_s for product in stack.products)
        figures = timed(steps, task.steps)
        slept_s = sum(product.slept_s for product in stack.products) - before_s
        return {**figures, "compute_s": slept_s / task.steps}

    return turn


def _steps(stack: Stack, weights: Weights, x: Tensor) -> Iterator[None]:
    while True:
        output = stack.forward(x)
        output.backward(torch.ones_like(output))
        weights.finish_gradients(stack.parameters())
        weights.on_change()
        for parameter in stack.parameters():
            parameter.grad = None
        yield


CONTESTANTS = [
    Contestant(way.name, MESH.num_ranks, partial(build, way), None if way.name == NONE else NONE)
    for way in WAYS
]
