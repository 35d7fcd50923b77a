"""What ranks measured becomes a cluster file with the fit's errors in its comments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ganglion.decide.costs import (
    BUCKET,
    BYTE,
    CALL,
    FLOP,
    LATENCY,
    MEMORY_BYTE,
    RING_BYTE,
    STEP,
    Tier,
    Timing,
    parse_cluster,
)
from ganglion.decide.predict import Measured, fit_cluster, together
from tests.pure.costs.test_fit import MACHINE, model_timings

SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)


def messages(kind: str, byte_s: float) -> list[Timing]:
    return [
        Timing(kind=kind, label=f"{n:.0f}", seconds=1e-5 + byte_s * n, terms={LATENCY: 1, BYTE: n})
        for n in SIZES
    ]


def rings() -> list[Timing]:
    return [
        Timing(
            kind=kind,
            label=f"{n:.0f}",
            seconds=5e-5 + steps * 2e-6 + steps / 2 * n * (2e-10 if kind == BUCKET else 4e-10),
            terms={CALL: 1, STEP: steps, RING_BYTE: steps / 2 * n},
        )
        for kind, steps in (("all-reduce", 2), ("all-gather", 1), (BUCKET, 1))
        for n in SIZES
    ]


def product(m: int, rate: float) -> Timing:
    flop = 2.0 * m**3
    return Timing(
        kind="product",
        label=f"{m} x {m} x {m}",
        seconds=flop / rate,
        terms={FLOP: flop, MEMORY_BYTE: 12.0 * m * m},
    )


MEASURED = Measured(
    name="mine",
    device="cpu",
    num_nodes=1,
    ranks_per_node=2,
    num_threads=1,
    memory_bytes=8 << 30,
    fp32_flops=1e11,
    bf16_flops=2e11,
    products=[product(32, 2e10), product(256, 9e10), product(512, 9e10)],
    training=model_timings(),
    links={"intra": [*messages("message", 1e-10), *rings()]},
    hidden_share=0.9,
    shares_memory=True,
    tiers={"disk": Tier(read_gbps=8.0, write_gbps=16.0)},
)


def test_the_file_has_the_machine_and_reads_back() -> None:
    fitted = fit_cluster(MEASURED)
    text = fitted.text()
    assert parse_cluster(text, "mine") == fitted.cluster
    compute, link = fitted.cluster.require_compute(), fitted.cluster.intra
    assert link is not None
    assert compute.efficiency == pytest.approx(MACHINE.efficiency, rel=1e-2)
    assert compute.activation_gbps == pytest.approx(50.0, rel=0.02)
    assert compute.memory_gib == 8.0
    assert link.bandwidth_gbps == pytest.approx(80.0, rel=1e-2)
    assert link.collective_gbps == pytest.approx(20.0, rel=1e-2)
    assert link.bucket_gbps == pytest.approx(40.0, rel=1e-2)
    assert link.collective_s == pytest.approx(5e-5, rel=1e-2)
    assert not link.shared
    assert fitted.cluster.tiers["disk"].write_gbps == 16.0
    assert text.startswith("# Measured by `ganglion profile`: 2 ranks on cpu, 1 thread each.\n")
    assert "#   compute, forward" in text and "of 7 times" in text
    assert "# the best product, 256 x 256 x 256" in text


def test_small_products_do_not_count_as_the_rate() -> None:
    labels = {one.label for one in fit_cluster(MEASURED).residuals if one.kind == "product"}
    assert labels == {"256 x 256 x 256", "512 x 512 x 512"}


def test_pairs_that_slow_each_other_down_share_their_link() -> None:
    busy = messages("messages at once", 3e-10)
    timings = [*messages("message", 1e-10), *busy, *rings()]
    link = fit_cluster(replace(MEASURED, links={"intra": timings})).cluster.intra
    assert link is not None and link.shared
    assert link.bandwidth_gbps == pytest.approx(80.0, rel=1e-2)  # that of one message


def test_times_of_ranks_are_their_median() -> None:
    first = Timing(kind="forward", label="a", seconds=1.0, terms={FLOP: 1.0})
    ranks = [[replace(first, seconds=s), replace(first, label="b")] for s in (1.0, 5.0, 2.0)]
    assert [(one.label, one.seconds) for one in together(ranks)] == [("a", 2.0), ("b", 1.0)]


def test_collectives_that_are_not_hidden_take_the_time_of_computation() -> None:
    assert fit_cluster(MEASURED).cluster.runtime.overlaps_collectives
    fitted = fit_cluster(replace(MEASURED, hidden_share=0.2))
    assert not fitted.cluster.runtime.overlaps_collectives
    assert "20% of an all-reduce was hidden behind products" in fitted.text()
