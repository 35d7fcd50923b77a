"""Predictions of a plan for a model, without a run file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ganglion.decide.costs import find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import Prediction, predict_layout
from ganglion.decide.shapes import GPTShape
from ganglion.errors import ConfigError, LayoutError

GPT = GPTShape(
    vocab_size=51200,
    seq_len=512,
    num_layers=4,
    hidden=1024,
    num_heads=16,
    num_kv_heads=16,
    head_size=64,
    mlp_hidden=4096,
)
PLAN = Plan(
    data=2, pipe=2, microbatch_size=2, num_microbatches=4, recompute="full", precision="fp16_master"
)


def predicted(plan: Plan = PLAN) -> Prediction:
    return predict_layout(GPT, plan, find_cluster("summit"))


def test_a_layout_has_time_memory_and_shares_of_the_peak() -> None:
    found = predicted()
    assert found.step_s > 0 and found.fits
    assert found.memory_by_rank is not None and len(found.memory_by_rank) == 4
    assert found.peak_share is not None and found.model_peak_share is not None
    b, s, layers, h, vocab = 16, 512, 4, 1024, 51200
    flop = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert found.peak_share == pytest.approx(flop / (found.step_s * 4 * 125e12))
    kept = predicted(replace(PLAN, recompute="none"))
    assert kept.peak_share == kept.model_peak_share
    assert kept.step_s < found.step_s


def test_plans_that_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"averaging.servers = 1, but averaging.method = 'none'"):
        predicted(replace(PLAN, servers=1))
    with pytest.raises(LayoutError, match=r"pipe = 20 stages cannot be cut from 10 blocks"):
        predicted(Plan(pipe=20, num_microbatches=20))
