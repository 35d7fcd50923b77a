"""The published planners choose what their papers say."""

from __future__ import annotations

import pytest

from ganglion.decide.planner import plan
from ganglion.errors import LayoutError


def test_axonn_4d_ranks_grids_by_its_communication_model() -> None:
    """Spec B.3: GPT-20B, 32 GPUs, B = 32; the vectors of the equations with two gathers."""
    found = plan("axonn4d-20b", cluster="perlmutter", gpus=32, batch=32, method="axonn", top=32)
    scores = [row.score_s for row in found.plans]
    assert scores == sorted(scores)  # type: ignore[type-var]
    best = found.best.plan
    assert (best.x, best.y, best.z, best.data) == (1, 1, 32, 1)
    assert scores[0] == pytest.approx(0.9557, rel=1e-3)
    assert all(row.plan.pipe == 1 for row in found.plans)


@pytest.mark.parametrize("batch", [512, 2048])
@pytest.mark.parametrize(("model", "depth"), [("gpt-2.2b", 8), ("gpt-3.8b", 16)])
def test_pipedream_2bw_chooses_the_published_depth(model: str, depth: int, batch: int) -> None:
    """2006.09503, section 5.2: d = 8 for 2.2 B and d = 16 for 3.8 B on 64 V100s, recomputing."""
    found = plan(
        model,
        cluster="p3.16xlarge",
        gpus=64,
        batch=batch,
        method="pipedream_2bw",
        fix="recompute=full",
    )
    assert found.best.plan.pipe == depth
    assert all(row.plan.schedule == "two_bw" for row in found.plans)
    scores = [row.score_s for row in found.plans]
    assert scores == sorted(scores)  # type: ignore[type-var]


def test_a_method_obeys_the_bound_of_staleness() -> None:
    """2BW is one update late, so nothing is left of its planner where that is forbidden."""
    with pytest.raises(LayoutError, match="or no --max-staleness"):
        plan(
            "gpt-355m",
            cluster="p3.16xlarge",
            gpus=8,
            batch=64,
            method="pipedream_2bw",
            max_staleness=0,
        )
