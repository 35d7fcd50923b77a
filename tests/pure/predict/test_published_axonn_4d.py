"""AxoNN-4D on Perlmutter and Frontier (2502.08145): its model exactly, its runs by ours.

Layouts of the runs are not published: each model is searched for the fastest layout that fits, and
its time stands beside the measured one. Each machine has one calibrated rate, its efficiency.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import correlation

import pytest

from ganglion.decide.costs import AxonnTimes, axonn_times, find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import Prediction, predict_layout
from ganglion.decide.shapes import GPTShape
from ganglion.decide.simulator import TensorOverlap
from ganglion.errors import ConfigError, LayoutError
from tests.support.published import gpt, off

SIZES = {
    5: (24, 4096, 32),
    10: (32, 5120, 40),
    20: (32, 7168, 56),
    40: (38, 9216, 72),
    80: (42, 12288, 96),
    160: (84, 12288, 96),
    320: (96, 16384, 128),
}
BATCH = 8192


def model(billions: int) -> GPTShape:
    return gpt(*SIZES[billions], seq_len=2048)


# --- its own model -------------------------------------------------------------------------------

Grid = tuple[int, int, int, int]  # x, y, z, data


def ranked(
    billions: int, num_ranks: int, batch: int, least: int, name: str
) -> list[tuple[Grid, AxonnTimes]]:
    """Return all grids of powers of two by their times, as spec B.3 enumerates them."""
    shape, cluster = model(billions), find_cluster(name)
    powers = [2**n for n in range(num_ranks.bit_length())]
    found = []
    for x, y, z in product(powers, repeat=3):
        data = num_ranks // (x * y * z)
        if data == 0 or x * y * z < least or batch % (z * data) or shape.num_heads % x:
            continue
        plan = Plan(
            x=x, y=y, z=z, data=data, microbatch_size=batch // (z * data), precision="bf16_master"
        )
        found.append(((x, y, z, data), axonn_times(shape, plan, cluster)))
    return sorted(found, key=lambda row: row[1].total_s)


def test_vectors_of_20b_on_32() -> None:
    """Spec B.3: 32 layouts, the best two, and the worst."""
    rows = ranked(20, 32, 32, 16, "perlmutter")
    assert len(rows) == 32
    (first, best), (second, other) = rows[:2]
    assert first == (1, 1, 32, 1) and round(best.total_s, 4) == 0.9557
    assert (round(best.ag_s, 4), round(best.rs_s, 4)) == (0.4778, 0.4778)
    assert second == (4, 1, 4, 2) and round(other.total_s, 4) == 0.9634
    parts = (other.ag_s, other.rs_s, other.ar_forward_s, other.ar_backward_s, other.ar_data_s)
    assert sorted(round(part, 4) for part in parts) == [0.0501, 0.0501, 0.1233, 0.3699, 0.3699]
    worst, last = rows[-1]
    assert worst == (1, 32, 1, 1) and round(last.total_s, 4) == 8.7376


def test_vectors_of_40b_on_64() -> None:
    rows = ranked(40, 64, 64, 32, "perlmutter")
    assert len(rows) == 40
    assert {grid for grid, _ in rows[:2]} == {(8, 1, 4, 2), (8, 1, 8, 1)}
    assert [round(times.total_s, 4) for _, times in rows[:3]] == [1.8513, 1.8513, 1.9063]
    assert rows[2][0] == (1, 1, 64, 1)
    assert rows[-1][0] == (1, 64, 1, 1) and round(rows[-1][1].total_s, 3) == 27.111


def test_vectors_of_80b_on_8192() -> None:
    rows = ranked(80, 8192, 8192, 64, "frontier")
    assert len(rows) == 384
    assert [(grid, round(times.total_s, 4)) for grid, times in rows[:2]] == [
        ((1, 1, 8192, 1), 7.6092),
        ((1, 1, 4096, 2), 7.6157),
    ]


def test_gathers_are_counted() -> None:
    """An engine that stores pieces gathers for backward, and again if it recomputes."""
    plan = Plan(z=32, precision="bf16_master")
    once, thrice = (
        axonn_times(model(20), plan, find_cluster("perlmutter"), num_gathers=n) for n in (1, 3)
    )
    assert thrice.ag_s == pytest.approx(3 * once.ag_s)
    assert thrice.rs_s == once.rs_s


def test_what_its_model_does_not_know_is_refused() -> None:
    shape, summit = model(5), find_cluster("summit")
    with pytest.raises(LayoutError, match=r"parallel.pipe = 2, but the communication model"):
        axonn_times(shape, Plan(pipe=2), find_cluster("perlmutter"))
    with pytest.raises(ConfigError, match=r"summit.toml: cluster.prefix_rates is missing"):
        axonn_times(shape, Plan(z=2), summit)
    with pytest.raises(ConfigError, match=r'intra_gbps has no "1x3", the rate of groups of 3'):
        axonn_times(shape, Plan(x=3, data=1), find_cluster("frontier"))


# --- its runs ------------------------------------------------------------------------------------


def layouts(billions: int, num_ranks: int, xs: tuple[int, ...]) -> Iterator[Plan]:
    for x, y, z in product(xs, (1, 2), (16, 32, 64)):
        share = BATCH * x * y // num_ranks  # samples of each (data, z) coordinate
        data = num_ranks // (x * y * z)
        if not share or not data or (billions < 160 and y > 1):
            continue
        size = min(8, share)
        yield Plan(
            x=x,
            y=y,
            z=z,
            data=data,
            microbatch_size=size,
            num_microbatches=share // size,
            precision="bf16_master",
            recompute="full",
            recompute_every=2,
        )


def fastest(billions: int, num_ranks: int, name: str, xs: tuple[int, ...]) -> Prediction:
    """Return the fastest layout that fits."""
    cluster = find_cluster(name)
    found = [
        predict_layout(model(billions), plan, cluster) for plan in layouts(billions, num_ranks, xs)
    ]
    return min((one for one in found if one.fits), key=lambda one: one.step_s)


@pytest.mark.parametrize(
    ("billions", "num_ranks", "measured_s"),
    [(5, 512, 9.03), (10, 1024, 7.45), (20, 2048, 8.00), (40, 4096, 8.79)],
)
def test_weak_scaling_on_perlmutter(billions: int, num_ranks: int, measured_s: float) -> None:
    """Figure 6 and table III, spec B.5: 8,192 sequences of 2,048 tokens."""
    found = fastest(billions, num_ranks, "perlmutter", (1, 2, 4))
    assert off(found.step_s, measured_s) == pytest.approx(0, abs=0.12)


@pytest.mark.parametrize(
    ("billions", "num_ranks", "measured_s", "tolerance"),
    [
        # Up to 40 B the runs waited 4 to 5 s for communication, and the layouts that we find wait
        # 1 to 3 s. Layouts of the runs are unknown; of those known, below, the waits are right.
        (5, 512, 17.74, 0.20),  # falls short
        (10, 1024, 18.92, 0.25),  # falls short
        (20, 2048, 19.76, 0.29),  # falls short
        (40, 4096, 18.38, 0.16),  # falls short
        (80, 8192, 18.49, 0.12),
        (160, 16384, 20.68, 0.16),  # falls short
        (320, 32768, 31.43, 0.12),
    ],
)
def test_weak_scaling_on_frontier(
    billions: int, num_ranks: int, measured_s: float, tolerance: float
) -> None:
    found = fastest(billions, num_ranks, "frontier", (1, 4, 8) if billions < 160 else (8, 16))
    assert off(found.step_s, measured_s) == pytest.approx(0, abs=tolerance)


@pytest.mark.parametrize(
    ("billions", "num_ranks", "measured_s"), [(5, 512, 13.84), (10, 1024, 13.87), (80, 8192, 12.44)]
)
def test_computation_on_frontier(billions: int, num_ranks: int, measured_s: float) -> None:
    """Figure 7, spec B.5: the part of a step that is not exposed communication."""
    found = fastest(billions, num_ranks, "frontier", (1, 8))
    assert off(found.step_s - found.exposed_s, measured_s) == pytest.approx(0, abs=0.10)


NONE = TensorOverlap(all_reduce=False, reduce_scatter=False, all_gather=False)


@pytest.mark.parametrize(
    ("billions", "num_ranks", "compute_s", "measured_s"),
    [(5, 512, 15.43, 33.82), (10, 1024, 14.70, 30.08), (80, 8192, 12.08, 27.96)],
)
def test_the_baseline_on_frontier(
    billions: int, num_ranks: int, compute_s: float, measured_s: float
) -> None:
    """Figure 7, spec D row 21: x inside a node, z and data between nodes, no overlap.

    How the paper divides ranks between z and data is not stated: z = 8 here.
    """
    size = min(8, BATCH * 8 // num_ranks)
    plan = Plan(
        x=8,
        z=8,
        data=num_ranks // 64,
        microbatch_size=size,
        num_microbatches=BATCH * 8 // num_ranks // size,
        precision="bf16_master",
        recompute="full",
        recompute_every=2,
    )
    found = predict_layout(model(billions), plan, find_cluster("frontier"), overlap=NONE)
    assert off(found.step_s, measured_s) == pytest.approx(0, abs=0.15)
    assert off(found.step_s - found.exposed_s, compute_s) == pytest.approx(0, abs=0.10)


def test_overlap_of_80b_on_frontier() -> None:
    """Figure 5, spec B.2, within 15 % in every row.

    12 GB of weights stay gathered, as AxoNN caches weights of the first layers.
    """
    kept = {"keep_gathered_mib": 12000.0}
    shape, cluster = model(80), find_cluster("frontier")
    plans = [replace(plan, **kept) for plan in layouts(80, 8192, (8,))]
    fitting = [plan for plan in plans if predict_layout(shape, plan, cluster).fits]
    plan = min(fitting, key=lambda one: predict_layout(shape, one, cluster).step_s)
    ways = [
        (NONE, 22.74),
        (replace(NONE, all_reduce=True), 22.23),
        (replace(NONE, all_reduce=True, reduce_scatter=True), 21.26),
        (TensorOverlap(), 18.49),
    ]
    for overlap, measured_s in ways:
        overlap = replace(overlap, keep_bytes=int(plan.keep_gathered_mib * 2**20))
        found = predict_layout(shape, plan, cluster, overlap=overlap)
        assert off(found.step_s, measured_s) == pytest.approx(0, abs=0.15)


# Observed seconds of a batch by rank in AxoNN-4D's own model; those without one were not plotted.
OBSERVED_20B = {
    1: 2.43, 2: 2.80, 3: 2.79, 4: 2.67, 5: 3.51, 6: 3.54, 7: 3.02, 8: 2.78, 9: 3.13, 10: 3.25,
    11: 3.29, 12: 3.88, 13: 3.90, 14: 3.53, 15: 3.52, 16: 3.83, 17: 3.83, 18: 7.00, 19: 7.41,
    20: 4.98, 21: 7.38, 22: 5.00, 23: 4.88, 24: 4.98, 25: 4.98, 26: 8.55, 28: 7.53, 29: 7.66,
}  # fmt: skip


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's coefficient; equal values share the mean of their ranks."""

    def ranks(values: list[float]) -> list[float]:
        below = [sum(b < a for b in values) for a in values]
        return [rank + (values.count(a) - 1) / 2 for rank, a in zip(below, values, strict=True)]

    return correlation(ranks(one), ranks(other))


def test_layouts_of_20b_on_32_in_the_order_of_their_runs() -> None:
    """Figure 2, spec B.3: all layouts were run on Perlmutter, with about 32 sequences."""
    shape, cluster = model(20), find_cluster("perlmutter")
    found = []
    for x, y, z, data in (grid for grid, _ in ranked(20, 32, 32, 16, "perlmutter")):
        size = 32 // (z * data)
        plan = Plan(
            x=x, y=y, z=z, data=data, microbatch_size=size, precision="bf16_master",
            recompute="full", recompute_every=2,
        )  # fmt: skip
        found.append(predict_layout(shape, plan, cluster).step_s)
    ours = [found[rank - 1] for rank in OBSERVED_20B]
    observed = list(OBSERVED_20B.values())
    assert rank_correlation(ours, observed) >= 0.8
    assert off(min(ours), min(observed)) == pytest.approx(0, abs=0.15)
    # Falls short of at most 4.2, as layouts whose sums over y leave the node are too slow.
    assert 2.8 <= max(ours) / min(ours) <= 5.0
