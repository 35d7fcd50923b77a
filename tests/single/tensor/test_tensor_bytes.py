"""What a split GPT moves, counted in its trace, is what the equations of the cost model say.

The products are compared element by element; norms, the embedding and the loss have labels of
their own in the trace and are listed apart.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.costs import Matmul, Repeats, Traffic, gpt_matmuls, ring_sent, tensor_traffic
from ganglion.decide.shapes import GPTShape, MLPShape
from ganglion.decide.topology import Mesh, Placement
from ganglion.execute.comm import Group, Handle, World, run_threads
from ganglion.execute.models import build_model, cross_entropy
from ganglion.execute.tensor import TensorSettings
from ganglion.trace import Event, Recorder
from tests.support.covering import Values, cells
from tests.support.tensors import SETTINGS

# Widths that 2, 3 and 4 divide, also two at a time.
SHAPE = GPTShape(
    vocab_size=48,
    seq_len=4,
    num_layers=2,
    hidden=48,
    num_heads=24,
    num_kv_heads=12,
    head_size=2,
    mlp_hidden=96,
    bias=True,
)
NUM_NORMS = 2 * SHAPE.num_layers + 1
NUM_STEPS = 2
ITEM = 8  # bytes of an fp64 number
APART = ("norm_", "embedding_", "output_")
LAYOUTS = [
    {"x": 2},
    {"y": 2},
    {"z": 2},
    {"x": 3},
    {"y": 3},
    {"z": 3},
    {"x": 4},
    {"z": 4},
    {"x": 2, "y": 2},
    {"x": 2, "z": 2},
    {"y": 2, "z": 2},
    {"x": 2, "y": 3},
    {"y": 2, "z": 3},
    {"x": 2, "y": 2, "z": 2},
    {"x": 2, "data": 2},
    {"y": 2, "data": 3},
    {"z": 2, "data": 2},
    {"x": 2, "y": 2, "data": 2},
    {"x": 2, "z": 2, "data": 2},
]


class CountedGroup:
    """A group that adds up the bytes of its all-reduces, for those that leave no axis behind."""

    def __init__(self, inner: Group, reduced: Counter[tuple[str, ...]], key: tuple[str, ...]):
        self._inner = inner
        self._reduced = reduced
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        self._reduced[self._key] += tensor.nbytes
        return self._inner.all_reduce(tensor, op)


def counted_world(world: World, reduced: Counter[tuple[str, ...]]) -> World:
    """Return the same world with groups that count."""
    uses: Counter[tuple[str, ...]] = Counter()

    def group_along(axes: tuple[str, ...]) -> Any:
        uses[axes] += 1
        return CountedGroup(world.group(*axes, use=str(uses[axes])), reduced, axes)

    return World(world.rank, world.mesh, group_along, carrier=world.carrier)


@dataclass(frozen=True)
class Seen:
    """What one rank moved in all steps: raw bytes of buffers by axis and kind, and over data."""

    bytes: Counter[tuple[str, str]]
    reduced: Counter[tuple[str, ...]]
    pieces: dict[str, int]  # bytes of this rank's piece of each parameter
    placements: dict[str, Placement]


def train(world: World, plan: Plan, settings: TensorSettings | None) -> Seen:
    reduced: Counter[tuple[str, ...]] = Counter()
    recorder = Recorder(world.rank)
    run = parallelize(
        build_model(SHAPE).double(),
        cross_entropy,
        partial(torch.optim.SGD, lr=0.1),
        plan,
        RunSettings(tensor=settings),
        world=counted_world(world, reduced),
        recorder=recorder,
    )
    reduced.clear()
    share = world.coordinates.data * plan.z + world.coordinates.z
    generator = torch.Generator().manual_seed(share)
    size = (plan.share_size, SHAPE.seq_len)
    batch = tuple(torch.randint(SHAPE.vocab_size, size, generator=generator) for _ in range(2))
    list(run.steps([batch] * NUM_STEPS))  # type: ignore[list-item]
    seen = Counter[tuple[str, str]]()
    for event in filter(_is_of_layers, recorder.events()):
        seen[event.axis, event.kind] += event.bytes
    pieces = {name: tensor.nbytes for name, tensor in run.gradients().items()}
    return Seen(seen, reduced, pieces, dict(run.placements()))


def _is_of_layers(event: Event) -> bool:
    return event.axis in ("x", "y", "z") and event.kind != "broadcast"


def ring_bytes(seen: Seen, mesh: Mesh) -> Traffic:
    """Return what the rings of the products carried."""

    def sent(axis: str, kind: str) -> float:
        return ring_sent(seen.bytes[axis, kind], mesh.size(axis))

    over_data = (
        seen.reduced[("data",)]
        - sum(
            size
            for name, size in seen.pieces.items()
            if not _is_product(name) and _alone(seen, name)
        )
        * NUM_STEPS
    )
    return Traffic(
        all_gather_z=sent("z", "all_gather"),
        reduce_scatter_z=sent("z", "reduce_scatter"),
        all_reduce_x=2 * sent("x", "all_reduce"),
        all_reduce_y=2 * sent("y", "all_reduce"),
        all_reduce_data=2 * ring_sent(over_data, mesh.data),
    )


def _is_product(name: str) -> bool:
    return name.endswith("weight") and not name.startswith("embedding") and "norm" not in name


def _alone(seen: Seen, name: str) -> bool:
    """Say whether a gradient is summed over data alone, as those of products are."""
    return "z" not in seen.placements[name].replicated or seen.reduced["data", "z"] == 0


def wanted_bytes(plan: Plan, repeats: Repeats) -> Traffic:
    layers = gpt_matmuls(SHAPE, plan.share_size * plan.z * SHAPE.seq_len)
    return tensor_traffic(layers, plan.mesh(), repeats) * (ITEM * NUM_STEPS)


def check(plan: Plan, repeats: Repeats, settings: TensorSettings | None = None) -> list[Seen]:
    """Train as threads; on every rank, products must have moved what the equations say."""
    everybody = run_threads(plan.mesh(), lambda world: train(world, plan, settings))
    wanted = wanted_bytes(plan, repeats)
    for seen in everybody:
        assert ring_bytes(seen, plan.mesh()) == wanted
        left = {kind for _, kind in seen.bytes if not kind.startswith(APART)}
        assert left <= {"all_reduce", "all_gather", "reduce_scatter"}
        assert seen.bytes["x", "all_gather"] == seen.bytes["y", "all_gather"] == 0
    return everybody


def plan_of(layout: dict[str, int], **options: Any) -> Plan:
    return Plan(**layout, microbatch_size=1, num_microbatches=2, **options)


def named(layout: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in layout.items())


@cells(layout=Values(LAYOUTS, name=named))
def test_products_move_what_the_equations_say(layout: dict[str, int]) -> None:
    plan = plan_of(layout)
    everybody = check(plan, Repeats.of_step(2))
    for seen in everybody:
        assert_apart(seen, plan)


def assert_apart(seen: Seen, plan: Plan) -> None:
    """Norms, loss and embedding, by hand; they are no part of the equations."""
    x, y, z = plan.x, plan.y, plan.z
    rows = plan.share_size * SHAPE.seq_len * NUM_STEPS
    wanted = Counter[tuple[str, str]]()
    if y > 1:  # mean and spread of every row, forward; two sums of every row, backward
        wanted["y", "norm_all_gather"] = NUM_NORMS * 2 * rows * y * ITEM
        wanted["y", "norm_all_reduce"] = NUM_NORMS * 2 * rows * ITEM
    if x > 1:  # the vectors of the tokens; largest logit, sum and target's logit of every row
        wanted["x", "embedding_all_reduce"] = rows * SHAPE.hidden // y * ITEM
        wanted["x", "output_all_gather"] = 3 * rows * x * ITEM
    found = {key: size for key, size in seen.bytes.items() if key[1].startswith(APART)}
    of_table = {key: found.pop(key) for key in list(found) if key[0] == "z"}
    assert found == wanted
    if z > 1:  # the table is gathered forward, and in the first step maybe once in vain
        table = SHAPE.vocab_size * SHAPE.hidden // (x * y) * ITEM
        num_uses = plan.num_microbatches * NUM_STEPS
        assert set(of_table) == {("z", "embedding_all_gather"), ("z", "embedding_reduce_scatter")}
        assert of_table["z", "embedding_reduce_scatter"] == table * num_uses
        assert table * num_uses <= of_table["z", "embedding_all_gather"]
        assert of_table["z", "embedding_all_gather"] <= table * (num_uses + 1)


SOME = [layout for layout in LAYOUTS if named(layout) in ("z3", "x2-z2", "x2-y2-z2", "z2-data2")]


@pytest.mark.parametrize("layout", SOME, ids=named)
def test_waiting_moves_the_same(layout: dict[str, int]) -> None:
    check(plan_of(layout), Repeats.of_step(2), SETTINGS["waiting"])


@pytest.mark.parametrize("layout", SOME, ids=named)
def test_kept_weights_are_gathered_once_a_step(layout: dict[str, int]) -> None:
    check(plan_of(layout), Repeats.of_step(2, keeps_gathered=True), SETTINGS["kept"])


@pytest.mark.parametrize("layout", SOME, ids=named)
def test_recomputing_gathers_a_third_time(layout: dict[str, int]) -> None:
    check(plan_of(layout, recompute="full"), Repeats.of_step(2, recomputes=True))


# --- a first layer whose inputs are data ---------------------------------------------------------

MLP = MLPShape(num_inputs=6, num_outputs=12, num_layers=3, hidden=24)


def train_mlp(world: World, plan: Plan, settings: TensorSettings) -> Counter[str]:
    recorder = Recorder(world.rank)
    run = parallelize(
        build_model(MLP).double(),
        cross_entropy,
        partial(torch.optim.SGD, lr=0.1),
        plan,
        RunSettings(tensor=settings),
        world=world,
        recorder=recorder,
    )
    batch = (torch.ones(plan.share_size, 6).double(), torch.ones(plan.share_size).long())
    list(run.steps([batch] * NUM_STEPS))
    moved = Counter[str]()
    for event in filter(_is_of_layers, recorder.events()):
        moved[event.kind] += event.bytes
    return moved


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_first_layer_is_not_gathered_for_a_gradient_of_data(name: str, recompute: str) -> None:
    plan = plan_of({"z": 2}, recompute=recompute)
    seen, *_ = run_threads(plan.mesh(), lambda world: train_mlp(world, plan, SETTINGS[name]))
    widths, rows = [6, 24, 24, 12], plan.share_size * plan.z
    layers = [
        Matmul(rows=rows, inputs=a, outputs=b, of_data=number == 0)
        for number, (a, b) in enumerate(pairwise(widths))
    ]
    repeats = Repeats.of_step(2, recomputes=recompute == "full", keeps_gathered=name == "kept")
    wanted = tensor_traffic(layers, plan.mesh(), repeats) * (ITEM * NUM_STEPS)
    # Where the first step ends is not known yet: overlap gathers for a microbatch that never comes.
    in_vain = 6 * 24 * ITEM if (name, recompute) == ("overlapped", "none") else 0
    assert ring_sent(seen["all_gather"] - in_vain, plan.z) == wanted.all_gather_z
    assert ring_sent(seen["reduce_scatter"], plan.z) == wanted.reduce_scatter_z


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        check(plan_of({"z": 2}), dataclasses.replace(Repeats.of_step(2), gathers=3))
