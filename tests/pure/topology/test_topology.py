"""Ranks, coordinates and groups agree for every factorization and every order of the axes."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.topology import AXES, Coordinates, Mesh, Placement, Shard
from ganglion.errors import LayoutError

meshes = st.builds(
    Mesh,
    data=st.integers(1, 4),
    pipe=st.integers(1, 4),
    x=st.integers(1, 3),
    y=st.integers(1, 3),
    z=st.integers(1, 3),
    rank_order=st.sampled_from(list(permutations(AXES))),
)


@given(meshes)
def test_coordinates_and_rank_are_inverse(mesh: Mesh) -> None:
    ranks = [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.num_ranks)]
    assert ranks == list(range(mesh.num_ranks))


@given(meshes, st.sampled_from([c for n in range(6) for c in combinations(AXES, n)]))
def test_groups_partition_the_ranks(mesh: Mesh, axes: tuple[str, ...]) -> None:
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
    for group in groups:
        assert mesh.group_of(group[-1], axes) == group
        others = [a for a in AXES if a not in axes]
        fixed = {tuple(mesh.coordinates(r).along(a) for a in others) for r in group}
        assert len(fixed) == 1


def test_rank_order_decides_who_is_next() -> None:
    inner_x = Mesh(x=2, data=2)
    assert [inner_x.coordinates(r).x for r in range(4)] == [0, 1, 0, 1]
    assert inner_x.groups(["data"]) == ((0, 2), (1, 3))
    inner_data = Mesh(x=2, data=2, rank_order=("data", "x", "y", "z", "pipe"))
    assert inner_data.groups(["data"]) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mesh(data=0), "axis data has size 0"),
        (lambda: Mesh(rank_order=("x", "y")), "must name each of"),
        (lambda: Mesh(data=2).coordinates(2), "rank 2 is outside a mesh of 2 ranks"),
        (lambda: Mesh().rank(Coordinates(x=1)), r"coordinate x=1 is outside 0\.\.0"),
        (lambda: Mesh().groups(["w"]), "unknown axis 'w'"),
    ],
)
def test_impossible_meshes_are_refused(make, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


@given(meshes)
def test_pieces_of_a_parameter_tile_it(mesh: Mesh) -> None:
    placement = Placement(
        shape=(36, 36), shards=(Shard(0, "y"), Shard(1, "x"), Shard(0, "z")), replicated=("data",)
    )
    height, width = placement.local_shape(mesh)
    cells = set()
    for rank in mesh.group_of(0, ["x", "y", "z"]):
        top, left = placement.offsets(mesh, mesh.coordinates(rank))
        cells |= {(top + i, left + j) for i in range(height) for j in range(width)}
    assert len(cells) == 36 * 36
    assert height * width * mesh.x * mesh.y * mesh.z == 36 * 36


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Placement(shape=(5,), shards=(Shard(0, "x"),)).local_shape(Mesh(x=2)),
            "has 5 entries, which x=2 does not divide",
        ),
        (lambda: Placement(shape=(4,), shards=(Shard(1, "x"),)), "dim 1 is outside"),
        (lambda: Placement(shape=(4,), shards=(Shard(0, "data"),)), "once: split"),
        (lambda: Placement(shape=(4,), replicated=("w",)), "unknown axis 'w'"),
    ],
)
def test_impossible_placements_are_refused(make, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()
