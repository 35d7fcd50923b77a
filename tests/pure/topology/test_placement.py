"""Pieces of a parameter: those of all ranks tile it, each as often as there are copies."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.topology import AXES, TENSOR_AXES, Box, Coordinates, Mesh, Placement, Shard
from ganglion.errors import LayoutError

Cell = tuple[int, ...]

meshes = st.builds(
    Mesh,
    data=st.integers(1, 2),
    pipe=st.integers(1, 2),
    x=st.integers(1, 3),
    y=st.integers(1, 3),
    z=st.integers(1, 3),
    rank_order=st.permutations(AXES).map(tuple),
)


@st.composite
def placements(draw: st.DrawFn, mesh: Mesh) -> Placement:
    """Any cuts of one to three dims, the first of a dim perhaps in sections, that fit the mesh."""
    num_dims = draw(st.integers(1, 3))
    axes = draw(st.lists(st.sampled_from(TENSOR_AXES), unique=True))
    shards: list[Shard] = []
    sizes = [draw(st.integers(1, 2)) for _ in range(num_dims)]
    for axis in axes:
        dim = draw(st.integers(0, num_dims - 1))
        is_first = all(shard.dim != dim for shard in shards)
        sections = draw(st.integers(1, 3)) if is_first else 1
        shards.append(Shard(dim, axis, sections))
        sizes[dim] *= mesh.size(axis) * sections
    return Placement(shape=tuple(sizes), shards=tuple(shards), replicated=("data",))


cases = meshes.flatmap(lambda mesh: st.tuples(st.just(mesh), placements(mesh)))


def _cells(start: Cell, size: Cell) -> list[Cell]:
    return list(product(*(range(b, b + n) for b, n in zip(start, size, strict=True))))


@given(cases)
def test_the_pieces_of_a_replica_tile_the_whole_as_often_as_there_are_copies(
    case: tuple[Mesh, Placement],
) -> None:
    mesh, placement = case
    held: Counter[Cell] = Counter()
    for rank in mesh.group_of(0, TENSOR_AXES):
        for start, _, size in placement.boxes(mesh, mesh.coordinates(rank)):
            held.update(_cells(start, size))
    whole = _cells((0,) * len(placement.shape), placement.shape)
    assert held == dict.fromkeys(whole, placement.num_copies(mesh))


@given(cases)
def test_the_boxes_of_a_rank_tile_its_piece(case: tuple[Mesh, Placement]) -> None:
    mesh, placement = case
    local = placement.local_shape(mesh)
    for rank in range(mesh.num_ranks):
        boxes = placement.boxes(mesh, mesh.coordinates(rank))
        found = Counter(cell for box in boxes for cell in _cells(box.local_start, box.size))
        assert found == dict.fromkeys(_cells((0,) * len(local), local), 1)
        assert all(size > 0 for box in boxes for size in box.size)


@given(cases)
def test_a_piece_keeps_the_order_of_the_whole(case: tuple[Mesh, Placement]) -> None:
    mesh, placement = case
    for rank in range(mesh.num_ranks):
        boxes = placement.boxes(mesh, mesh.coordinates(rank))
        for dim in range(len(placement.shape)):
            spans = {(box.local_start[dim], box.start[dim], box.size[dim]) for box in boxes}
            ends = [start + size for _, start, size in sorted(spans)]
            assert ends == sorted(ends)
            assert len(ends) == len(set(ends))


@given(cases)
def test_only_split_axes_matter(case: tuple[Mesh, Placement]) -> None:
    mesh, placement = case
    split = {shard.axis for shard in placement.shards}
    held: dict[tuple[int, ...], list[Box]] = {}
    for rank in range(mesh.num_ranks):
        at = mesh.coordinates(rank)
        key = tuple(at.along(axis) for axis in TENSOR_AXES if axis in split)
        boxes = placement.boxes(mesh, at)
        assert held.setdefault(key, boxes) == boxes
    parts = math.prod(mesh.size(axis) for axis in split)
    assert len(held) == parts
    assert placement.num_copies(mesh) * parts == mesh.x * mesh.y * mesh.z


@given(cases)
def test_a_piece_has_its_share_of_every_section(case: tuple[Mesh, Placement]) -> None:
    mesh, placement = case
    for shard in placement.shards:
        alone = Placement(shape=placement.shape, shards=(shard,))
        each = placement.shape[shard.dim] // shard.sections
        for coordinate in range(mesh.size(shard.axis)):
            at = Coordinates(**{shard.axis: coordinate})
            boxes = alone.boxes(mesh, at)
            sections = [box.start[shard.dim] // each for box in boxes]
            assert sections == list(range(shard.sections))
            assert {box.size[shard.dim] for box in boxes} == {each // mesh.size(shard.axis)}


def test_queries_keys_and_values_are_cut_each_for_itself() -> None:
    fused = Placement(shape=(12, 4), shards=(Shard(0, "x", 3), Shard(0, "z"), Shard(1, "y")))
    mesh = Mesh(x=2, y=2, z=2)
    first = fused.boxes(mesh, Coordinates(x=1, y=1, z=0))
    assert first == [Box((2, 2), (0, 0), (2, 2)), Box((6, 2), (2, 0), (1, 2))]
    second = fused.boxes(mesh, Coordinates(x=1, y=1, z=1))
    assert second == [Box((7, 2), (0, 0), (1, 2)), Box((10, 2), (1, 0), (2, 2))]


def test_copies_count_what_does_not_split() -> None:
    mesh = Mesh(x=2, y=3, z=4, data=5)
    bias = Placement(shape=(6,), shards=(Shard(0, "x"),), replicated=("z", "data"))
    weight = Placement(shape=(24, 3), shards=(Shard(0, "x"), Shard(0, "z"), Shard(1, "y")))
    assert (bias.num_copies(mesh), weight.num_copies(mesh)) == (12, 1)
    assert Placement(shape=()).num_copies(mesh) == 24


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement(shape=(6, 5), shards=(Shard(1, "x"),)), "dim 1 of .* has 5 entries, .* x=2"),
        (Placement(shape=(6,), shards=(Shard(0, "x", 2),)), "in 2 sections, .* multiple of 4"),
        (Placement(shape=(6,), shards=(Shard(0, "x"), Shard(0, "y"))), "has 3 entries, .* y=2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(placement: Placement, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        placement.boxes(Mesh(x=2, y=2), Coordinates())
