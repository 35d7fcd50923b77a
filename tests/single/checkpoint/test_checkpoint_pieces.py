"""Pieces of tensors: saved in one layout, loaded in any other, each box written once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import AdamW

from ganglion.decide.plan import Plan
from ganglion.decide.topology import Box, Mesh, Placement, Shard
from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint import (
    Piece,
    RankPlacements,
    Saveable,
    SavedState,
    check_state_shapes,
    gather_whole,
    load,
    optimizer_pieces,
    optimizer_record,
    optimizer_tensors,
    prepare_optimizers,
    save,
)
from ganglion.execute.checkpoint.collective import TensorSavePlanner, load_shards
from ganglion.execute.checkpoint.storage import ShardReader, ShardWriter
from ganglion.execute.comm import World, run_threads

MESHES = [Mesh(), Mesh(x=2), Mesh(x=2, z=2), Mesh(y=2, z=2, data=2), Mesh(x=2, y=2, z=2)]
STATE = SavedState(step=4, plan=Plan())
SHARDS = {
    "linear.weight": ((12, 8), (Shard(1, "y"), Shard(0, "x"), Shard(0, "z"))),
    "fused.weight": ((24, 4), (Shard(1, "y"), Shard(0, "x", 3), Shard(0, "z"))),
    "fused.bias": ((24,), (Shard(0, "x", 3),)),
    "flipped.weight": ((8, 24), (Shard(0, "y"), Shard(1, "x", 3), Shard(0, "z"))),
    "conv.weight": ((8, 4, 3, 3), (Shard(0, "x"), Shard(1, "y"), Shard(0, "z"))),
    "norm.weight": ((6,), ()),
    "scale": ((), ()),
}
PLACEMENTS = {name: Placement(shape=shape, shards=cuts) for name, (shape, cuts) in SHARDS.items()}


class Alone:
    """The ranks of a run with one process."""

    rank = 0
    num_ranks = 1

    def barrier(self) -> None:
        """Nobody to wait for."""


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHARDS.items()}


def places_of(mesh: Mesh, rank: int) -> RankPlacements:
    return RankPlacements(PLACEMENTS, mesh, mesh.coordinates(rank))


def cut(mesh: Mesh, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Saveable]:
    """Cut out by hand, box for box, what a rank holds."""
    places, held = places_of(mesh, rank), {}
    for name, tensor in tensors.items():
        piece = torch.full(PLACEMENTS[name].local_shape(mesh), math.nan)
        for box in PLACEMENTS[name].boxes(mesh, mesh.coordinates(rank)):
            at = tuple(slice(b, b + n) for b, n in zip(box.start, box.size, strict=True))
            here = tuple(slice(b, b + n) for b, n in zip(box.local_start, box.size, strict=True))
            piece[here] = tensor[at]
        held[name] = places.piece(name, piece)
    return held


def tensor_of(value: Saveable) -> Tensor:
    return value.tensor if isinstance(value, Piece) else value


def blank(held: Mapping[str, Saveable], places: RankPlacements) -> dict[str, Saveable]:
    empty = {name: torch.full_like(tensor_of(value), math.nan) for name, value in held.items()}
    return {name: places.piece(name, tensor) for name, tensor in empty.items()}


def save_as_ranks(folder: Path, ranks: Sequence[Mapping[str, Saveable]]) -> list[Path]:
    """Do what DCP does for several ranks, one after the other."""
    folder.mkdir(parents=True)
    planners = [TensorSavePlanner() for _ in ranks]
    for number, (planner, held) in enumerate(zip(planners, ranks, strict=True)):
        planner.set_up_planner(dict(held), is_coordinator=number == 0)
    plans, _ = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    writer = ShardWriter(folder, begin=lambda: None, commit=lambda records: None)
    plans = writer.prepare_global_plan(plans)
    for plan, planner in zip(plans, planners, strict=True):
        writer.write_data(plan, planner).wait()
    return sorted(folder.iterdir())


def save_layout(folder: Path, mesh: Mesh) -> list[Path]:
    held = [cut(mesh, rank, whole()) for rank in range(mesh.num_ranks)]
    return save_as_ranks(folder, held)


def named(mesh: Mesh) -> str:
    return "-".join(f"{axis}{size}" for axis, size in mesh.sizes().items() if size > 1) or "one"


# From any layout to any other


@pytest.mark.parametrize(("saved", "loaded"), [*product(MESHES, MESHES)], ids=named)
def test_every_layout_loads_in_every_other(tmp_path: Path, saved: Mesh, loaded: Mesh) -> None:
    files = save_layout(tmp_path / "shards", saved)
    for rank in range(loaded.num_ranks):
        wanted = cut(loaded, rank, whole())
        target = blank(wanted, places_of(loaded, rank))
        load_shards(target, ShardReader(files), None)
        for name, value in wanted.items():
            assert torch.equal(tensor_of(target[name]), tensor_of(value)), f"{name} of rank {rank}"


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_every_element_is_written_once(tmp_path: Path, mesh: Mesh) -> None:
    counts = dict.fromkeys(SHARDS, 0)
    for file in save_layout(tmp_path / "shards", mesh):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                counts[name] += math.prod(shard.get_slice(name).get_shape())
    assert counts == {name: math.prod(shape) for name, (shape, _) in SHARDS.items()}


def test_several_boxes_of_a_name_go_to_several_files(tmp_path: Path) -> None:
    names = [path.name for path in save_layout(tmp_path / "shards", Mesh(x=2))]
    assert names == [
        f"rank-0000{rank}{part}.safetensors" for rank in range(2) for part in ("-1", "-2", "")
    ]


def test_the_tools_of_torch_read_the_shards(tmp_path: Path) -> None:
    save_layout(tmp_path / "shards", Mesh(x=2, z=2))
    target = {name: torch.zeros(shape) for name, (shape, _) in SHARDS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(
            target,
            storage_reader=HuggingFaceStorageReader(str(tmp_path / "shards")),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    for name, tensor in whole().items():
        assert torch.equal(target[name], tensor), name


# What is refused


def one_piece(shape: tuple[int, ...], start: int, size: int) -> Piece:
    """Return some rows of a whole of that shape."""
    zeros, extent = (0,) * (len(shape) - 1), shape[1:]
    box = Box((start, *zeros), (0, *zeros), (size, *extent))
    return Piece(torch.ones(size, *extent), shape, (box,))


def save_alone(folder: Path, held: Mapping[str, Saveable]) -> Path:
    return save(folder, held, STATE, Alone(), keep=1)


def test_a_tensor_with_holes_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hold 8 of the 16 elements of w: all ranks"):
        save_alone(tmp_path, {"w": one_piece((4, 4), 0, 2)})
    assert list(tmp_path.iterdir()) == []


def test_another_whole_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = save_alone(tmp_path, {"w": torch.ones(4, 4)})
    target = one_piece((8, 4), 0, 4)  # the piece is as large as what was saved
    before = target.tensor.clone()
    with pytest.raises(CheckpointError, match=r"w \(saved \[4, 4\] float32, here \[8, 4\] float32"):
        load(path, {"w": target})
    assert torch.equal(target.tensor, before)


def test_damaged_second_files_are_noticed(tmp_path: Path) -> None:
    halves = (Box((2,), (0,), (2,)), Box((0,), (2,), (2,)))
    path = save_alone(tmp_path, {"w": Piece(torch.arange(4.0), (4,), halves)})
    target = {"w": torch.zeros(4)}
    load(path, target)
    assert target["w"].tolist() == [2.0, 3.0, 0.0, 1.0]
    second = path / "shards/rank-00000-1.safetensors"
    second.write_bytes(second.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"rank-00000-1\.safetensors has CRC-32"):
        load(path, target)


def test_boxes_must_fill_the_tensor() -> None:
    with pytest.raises(AssertionError, match=r"boxes of 2, tensor \(3,\)"):
        Piece(torch.zeros(3), (4,), (Box((0,), (0,), (2,)),))


# Optimizer state


class Net(nn.Module):
    def __init__(self, held: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(held["weight"].clone())
        self.bias = nn.Parameter(held["bias"].clone())


NET = {
    "weight": Placement(shape=(6, 4), shards=(Shard(0, "x", 3),)),
    "bias": Placement(shape=(6,), shards=()),
}


def stepped(tensors: Mapping[str, Tensor]) -> tuple[Net, AdamW]:
    """Take a step; the moments then depend on each element alone."""
    net = Net(tensors)
    optimizer = AdamW(net.named_parameters(), lr=0.1)
    sum(p.square().sum() for p in net.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return net, optimizer


def test_state_is_cut_like_its_parameter(tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(6, 4), "bias": torch.randn(6)}
    _, optimizer = stepped(tensors)
    state = SavedState(step=1, plan=Plan(), optimizer=optimizer_record([optimizer]))
    path = save(tmp_path, optimizer_tensors([optimizer]), state, Alone(), keep=1)
    mesh = Mesh(x=2)
    for rank in range(2):
        places = RankPlacements(NET, mesh, mesh.coordinates(rank))
        rows = [rank, 2 + rank, 4 + rank]
        own = {"weight": tensors["weight"][rows], "bias": tensors["bias"]}
        _, expected = stepped(own)
        made = AdamW(Net(own).named_parameters(), lr=0.1)
        prepare_optimizers([made], path, places)
        load(path, optimizer_pieces([made], places))
        found, wanted = optimizer_tensors([made]), optimizer_tensors([expected])
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert torch.equal(found[key], wanted[key]), key
        check_state_shapes([made], places)


def test_state_of_another_shape_is_refused_where_the_parameter_is_split() -> None:
    net, optimizer = stepped({"weight": torch.randn(3, 4), "bias": torch.randn(6)})
    mesh = Mesh(x=2)
    places = RankPlacements(NET, mesh, mesh.coordinates(0))
    optimizer.state[net.bias]["row"] = torch.zeros(2)
    check_state_shapes([optimizer], places)
    optimizer.state[net.weight]["row"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"optimizer\.row\.weight has shape \[3\], but its"):
        check_state_shapes([optimizer], places)


# Whole tensors


def gathered(mesh: Mesh, stage_of: Callable[[str], int]) -> list[dict[str, Tensor] | None]:
    """Gather over all ranks of a replica, some names on each stage; "scale" is on all."""

    def body(world: World) -> dict[str, Tensor] | None:
        held = cut(mesh, world.rank, whole())
        stage = world.coordinates.pipe
        mine = {n: value for n, value in held.items() if n == "scale" or stage_of(n) == stage}
        return gather_whole(mine, world.group("x", "y", "z", "pipe"), torch.device("cpu"))

    return run_threads(mesh, body)


@pytest.mark.parametrize(
    "mesh", [*MESHES[:3], Mesh(x=2, y=2, z=2), Mesh(pipe=2, x=2, z=2)], ids=named
)
def test_the_first_member_gathers_the_whole(mesh: Mesh) -> None:
    found = gathered(mesh, lambda name: len(name) % mesh.size("pipe"))
    assert found[1:] == [None] * (mesh.num_ranks - 1)
    assert found[0] is not None and found[0].keys() == whole().keys()
    for name, tensor in whole().items():
        assert torch.equal(found[0][name], tensor), name


def test_what_one_rank_holds_whole_is_not_copied() -> None:
    def body(world: World) -> bool:
        mine = {"w": torch.ones(3)}
        found = gather_whole(mine, world.group("x"), torch.device("cpu"))
        return found is not None and found["w"] is mine["w"]

    assert run_threads(Mesh(), body) == [True]


def test_a_part_is_no_copy() -> None:
    tensor = torch.zeros(4, 4)
    Piece.of(tensor).part(Box((5, 6), (1, 2), (2, 1))).fill_(1)
    assert tensor.nonzero().tolist() == [[1, 2], [2, 2]]
