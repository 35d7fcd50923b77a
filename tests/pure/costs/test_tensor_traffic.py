"""Bytes of 3-D parallel products: hand numbers, the laws of the equations, and published times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.costs import (
    PAPER,
    Matmul,
    Repeats,
    Traffic,
    gpt_matmuls,
    ring_sent,
    tensor_traffic,
)
from ganglion.decide.shapes import GPTShape
from ganglion.decide.topology import Mesh
from ganglion.errors import LayoutError

SMALL = Matmul(rows=48, inputs=24, outputs=36)
TURNED = Matmul(rows=48, inputs=24, outputs=36, transposed=True)


def test_one_layer_by_hand() -> None:
    """On x=2, y=3, z=4, data=5: blocks of the weight are 8 x 18, those of the output 12 x 18."""
    found = tensor_traffic([SMALL], Mesh(x=2, y=3, z=4, data=5), PAPER)
    assert found.all_gather_z == 8 * 18 * 3 / 4
    assert found.reduce_scatter_z == 8 * 18 * 3 / 4
    assert found.all_reduce_y == pytest.approx(12 * 18 * 2 * 2 / 3, rel=1e-15)
    assert found.all_reduce_x == 12 * 8 * 2 * 1 / 2
    assert found.all_reduce_data == pytest.approx(8 * 18 / 4 * 2 * 4 / 5, rel=1e-15)
    assert found.along_z == 216
    assert found.total == pytest.approx(216 + 288 + 96 + 57.6)


def test_a_transposed_layer_by_hand() -> None:
    """The same mesh: inputs are split over x, so blocks are 12 x 12; the output is summed on x."""
    found = tensor_traffic([TURNED], Mesh(x=2, y=3, z=4), PAPER)
    assert found.all_reduce_x == 12 * 12 * 2 * 1 / 2
    assert found.all_reduce_y == 12 * 12 * 2 * 2 / 3
    assert found.all_reduce_data == 0


def test_gathers_are_counted_as_told() -> None:
    mesh = Mesh(z=2, y=2)
    paper = tensor_traffic([SMALL], mesh, PAPER)
    for gathers in (1, 2, 3):
        found = tensor_traffic([SMALL], mesh, Repeats(gathers=gathers))
        assert found.all_gather_z == gathers * paper.all_gather_z
        assert found.reduce_scatter_z == paper.reduce_scatter_z


def test_a_layer_of_data_has_no_gradient_of_its_inputs() -> None:
    mesh, first = Mesh(x=2, y=2, z=2), replace(SMALL, of_data=True)
    for recomputes in (False, True):
        repeats = Repeats.of_step(4, recomputes=recomputes)
        inner, outer = (tensor_traffic([layer], mesh, repeats) for layer in (SMALL, first))
        spared = tensor_traffic([SMALL], mesh, Repeats(gathers=4)).all_gather_z
        assert outer == replace(inner, all_gather_z=inner.all_gather_z - spared, all_reduce_x=0.0)
    for repeats in (PAPER, Repeats.of_step(4, keeps_gathered=True)):
        assert tensor_traffic([first], mesh, repeats).all_gather_z == 24 * 36 / 8


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, Repeats(gathers=8, scatters=4, forwards=1)),
        ({"recomputes": True}, Repeats(gathers=12, scatters=4, forwards=2)),
        ({"keeps_gathered": True}, Repeats(gathers=1, scatters=1, forwards=1)),
        ({"keeps_gathered": True, "recomputes": True}, Repeats(gathers=1, forwards=2)),
    ],
)
def test_a_step_of_four_microbatches(options: Mapping[str, bool], wanted: Repeats) -> None:
    assert Repeats.of_step(4, **options) == wanted


def test_a_step_without_microbatches_is_refused() -> None:
    with pytest.raises(LayoutError, match="0 microbatches"):
        Repeats.of_step(0)


def test_recomputing_repeats_the_forward_sums_alone() -> None:
    mesh = Mesh(x=2, y=2)
    once, twice = (tensor_traffic([SMALL], mesh, Repeats(forwards=n)) for n in (1, 2))
    assert twice.all_reduce_y == 2 * once.all_reduce_y
    assert twice.all_reduce_x == once.all_reduce_x


sizes = st.integers(1, 5)
meshes = st.builds(Mesh, x=sizes, y=sizes, z=sizes, data=sizes)


@given(meshes, st.booleans())
def test_transposing_is_swapping_x_and_y(mesh: Mesh, transposed: bool) -> None:
    layer = Matmul(rows=48, inputs=24, outputs=36, transposed=transposed)
    turned = Matmul(rows=48, inputs=24, outputs=36, transposed=not transposed)
    found = tensor_traffic([layer], mesh, PAPER)
    other = tensor_traffic([turned], Mesh(x=mesh.y, y=mesh.x, z=mesh.z, data=mesh.data), PAPER)
    assert (found.all_reduce_x, found.all_reduce_y) == (other.all_reduce_y, other.all_reduce_x)
    assert found.along_z == other.along_z
    assert found.all_reduce_data == other.all_reduce_data


@given(meshes)
def test_z_and_data_move_the_same_if_gathered_once(mesh: Mesh) -> None:
    """The sum telescopes: it depends on z * data alone (spec B.3, a property of the model)."""
    found = tensor_traffic([SMALL], mesh, PAPER)
    merged = tensor_traffic([SMALL], Mesh(x=mesh.x, y=mesh.y, data=mesh.z * mesh.data), PAPER)
    both = found.along_z + found.all_reduce_data
    assert both == pytest.approx(merged.all_reduce_data)


@given(meshes)
def test_layers_and_bytes_add_up(mesh: Mesh) -> None:
    both = tensor_traffic([SMALL, TURNED], mesh, PAPER) * 2
    one, other = (tensor_traffic([layer], mesh, PAPER) for layer in (SMALL, TURNED))
    assert both == (one + other) * 2
    assert both.total == pytest.approx(2 * (one.total + other.total))


def test_a_whole_number_of_elements_is_exact() -> None:
    assert ring_sent(3 * 7 * (1 << 40), 3, 7) == 2 << 40
    assert tensor_traffic([SMALL], Mesh(), Repeats(gathers=9)) == Traffic()


# --- the spec's test vectors: seconds of the equations on the authors' bandwidths ----------------

PERLMUTTER = {(1, 2): 76, (1, 4): 225, (2, 2): 76}
FRONTIER = {(1, 2): 129, (1, 4): 52, (1, 8): 135, (2, 2): 50, (2, 4): 72, (4, 2): 36}
AXES = ("x", "y", "z", "data")
GPTS = {"20B": (32, 7168, 56), "40B": (38, 9216, 72), "80B": (42, 12288, 96)}


def layers_of(model: str, batch: int, mesh: Mesh) -> list[Matmul]:
    num_layers, hidden, num_heads = GPTS[model]
    shape = GPTShape(
        vocab_size=51200,
        seq_len=2048,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        mlp_hidden=4 * hidden,
    )
    # The authors leave the head out.
    return gpt_matmuls(shape, batch * shape.seq_len // mesh.data)[:-1]


def seconds(
    model: str,
    batch: int,
    sizes: tuple[int, ...],
    table: Mapping[tuple[int, int], float],
    inter: float,
) -> tuple[float, ...]:
    """Return gather, scatter, all-reduces of x and y, and of data: bf16 over the bandwidths."""
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    node = 4 if table is PERLMUTTER else 8
    rates, inside = {}, 1
    for axis, size in zip(AXES, sizes, strict=True):
        fits = size > 1 and inside * size <= node
        rates[axis] = 1e9 * (table[inside, size] if fits else inter / min(node, inside))
        inside *= size
    moved = tensor_traffic(layers_of(model, batch, mesh), mesh, PAPER) * 2
    return (
        moved.all_gather_z / rates["z"],
        moved.reduce_scatter_z / rates["z"],
        moved.all_reduce_x / rates["x"],
        moved.all_reduce_y / rates["y"],
        moved.all_reduce_data / rates["data"],
    )


@pytest.mark.parametrize(
    ("model", "batch", "sizes", "wanted"),
    [
        ("20B", 32, (1, 1, 32, 1), 0.9557),
        ("20B", 32, (4, 1, 4, 2), 0.9634),
        ("20B", 32, (1, 32, 1, 1), 8.7376),
        ("40B", 64, (8, 1, 4, 2), 1.8513),
        ("40B", 64, (8, 1, 8, 1), 1.8513),
        ("40B", 64, (1, 1, 64, 1), 1.9063),
        ("40B", 64, (1, 64, 1, 1), 27.111),
    ],
)
def test_times_on_perlmutter(model: str, batch: int, sizes: tuple[int, ...], wanted: float) -> None:
    found = sum(seconds(model, batch, sizes, PERLMUTTER, 80))
    assert found == pytest.approx(wanted, abs=0.6 * 10 ** -(3 if wanted > 10 else 4))


@pytest.mark.parametrize(
    ("sizes", "wanted"), [((1, 1, 8192, 1), 7.6092), ((1, 1, 4096, 2), 7.6157)]
)
def test_times_on_frontier(sizes: tuple[int, ...], wanted: float) -> None:
    assert sum(seconds("80B", 8192, sizes, FRONTIER, 40)) == pytest.approx(wanted, abs=6e-5)


def test_the_parts_of_one_time() -> None:
    """GPT-20B on (4, 1, 4, 2): forward and backward all-reduces run on x alone, alike."""
    gather, scatter, over_x, over_y, over_data = seconds("20B", 32, (4, 1, 4, 2), PERLMUTTER, 80)
    assert (gather, scatter) == pytest.approx((0.3699, 0.3699), abs=5e-5)
    assert over_x == pytest.approx(0.0501 + 0.0501, abs=1e-4)
    assert over_y == 0
    assert over_data == pytest.approx(0.1233, abs=5e-5)


@pytest.mark.parametrize(
    ("model", "num_ranks", "least", "num_configs", "best"),
    [
        ("20B", 32, 16, 32, {(1, 1, 32, 1)}),
        ("40B", 64, 32, 40, {(8, 1, 4, 2), (8, 1, 8, 1)}),
    ],
)
def test_the_best_of_all_layouts(
    model: str, num_ranks: int, least: int, num_configs: int, best: set[tuple[int, ...]]
) -> None:
    """All powers of two that fit; `least` ranks hold the model, heads divide by x."""
    heads = GPTS[model][2]
    powers = [1 << i for i in range(num_ranks.bit_length())]
    configs = [
        sizes
        for sizes in product(powers, repeat=4)
        if sizes[0] * sizes[1] * sizes[2] * sizes[3] == num_ranks
        and sizes[0] * sizes[1] * sizes[2] >= least
        and heads % sizes[0] == 0
    ]
    assert len(configs) == num_configs
    times = {sizes: sum(seconds(model, num_ranks, sizes, PERLMUTTER, 80)) for sizes in configs}
    fastest = min(times.values())
    assert {sizes for sizes, taken in times.items() if taken == pytest.approx(fastest)} == best
