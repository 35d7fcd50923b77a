"""The planner benchmark runs and has a row for every layout, in the form that others read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner.layouts import best_of, real_layouts, virtual_layouts
from tests.support.command import python


def test_enough_layouts_of_every_kind() -> None:
    real, virtual = real_layouts(quick=False), virtual_layouts(quick=False)
    layouts = [*real, *virtual]
    assert len(layouts) >= 16
    assert sum(one.seen for one in layouts) <= len(layouts) / 2
    assert len({one.name for one in layouts}) == len(layouts)
    assert {one.plan.num_ranks for one in real} == {2}
    assert {one.plan.num_ranks for one in virtual} == {4, 8}
    assert {one.model for one in real} == {"gpt-large", "gpt-small", "mlp"}
    schedules = {one.plan.schedule for one in real if one.plan.pipe > 1}
    assert schedules == {"one_f_one_b", "message_driven", "two_bw", "gpipe"}
    assert all(any(getattr(one.plan, axis) > 1 for one in real) for axis in ("data", "x", "z"))
    for model in {one.model for one in layouts}:  # or no best one could be named
        assert len({one.plan.global_batch_size for one in layouts if one.model == model}) == 1


def test_the_best_is_that_of_its_model() -> None:
    layouts = real_layouts(quick=False)
    seconds = {one.name: float(place) for place, one in enumerate(layouts)}
    first = next(one for one in layouts if one.model == "mlp")
    assert best_of("mlp", layouts, seconds) == first


def test_every_layout_is_predicted_and_measured(tmp_path: Path) -> None:
    done = python(
        *("-m", "benchmarks.planner", "--quick", "--rounds", "1", "--steps", "1", "--json"),
        *("--cluster", "laptop", "--only", "mlp", "--only", "gpt-asleep"),
        cwd=tmp_path,
        deadline_s=110,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    chosen = [*real_layouts(quick=True), *virtual_layouts(quick=True)]
    rows = {row["name"]: row for row in record["rows"]}
    assert set(rows) == {one.name for one in chosen if one.model in ("mlp", "gpt-asleep")}
    for row in rows.values():
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert 0 < row["low_s"] <= row["measured_s"] <= row["high_s"]
        # Stages sleep what was predicted: steps cannot be much shorter.
        assert not row["virtual"] or row["measured_s"] > 0.8 * row["predicted_s"]
    bars = {(bar["row"], bar["measure"]): bar for bar in record["bars"]}
    unseen = [abs(row["error"]) for row in rows.values() if not row["seen"]]
    assert bars["unseen layouts", "worst error"]["measured"] == max(unseen)
    assert bars["mlp", "planned over measured best"]["measured"] == 1.0  # there is but one
    assert list(tmp_path.iterdir()) == []
