"""The memory benchmark runs and has every row it promises, in the form that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import python

COMMAND = ("-m", "benchmarks.memory")
DEADLINE_S = 300
AT_MOST = "most"


def run(part: str, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Run a part; return the JSON it prints, and its rows by name."""
    options = ("--quick", "--rounds", "1", "--json", "--part", part, "--dir", str(folder))
    done = python(*COMMAND, *options, cwd=folder, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["machine"]["cores"] >= 1 and record["machine"]["quick"]
    assert list(folder.iterdir()) == []
    rows = {row["name"]: row for row in record["rows"]}
    for bar in record["bars"]:
        assert bar["measured"] == rows[bar["row"]]["value"]
        over = bar["measured"] - bar["bar"]
        assert bar["met"] == (over <= 0 if bar["measure"] == AT_MOST else over >= 0)
    return record, rows


def test_state_of_both_sides(tmp_path: Path) -> None:
    record, rows = run("state", tmp_path)
    assert set(rows) == {"state_resident", "state_offloaded", "state_ratio"}
    assert record["machine"]["disk_write_mb_s"] > 0 and record["machine"]["disk_read_mb_s"] > 0
    assert {bar["row"] for bar in record["bars"]} == set(rows)
    ratio = rows["state_resident"]["value"] / rows["state_offloaded"]["value"]
    assert rows["state_ratio"]["value"] == pytest.approx(ratio)


@pytest.mark.slow
def test_steps_of_both_sides(tmp_path: Path) -> None:
    _, rows = run("step", tmp_path)
    for count in (1, 2):
        parts = (rows[f"step_{name}_{count}"]["value"] for name in ("offloaded", "resident"))
        offloaded, resident = parts
        assert rows[f"step_ratio_{count}"]["value"] == pytest.approx(offloaded / resident)


def test_published_figures(tmp_path: Path) -> None:
    record, rows = run("published", tmp_path)
    assert len(rows) == 8 and record["bars"][0]["met"]
    for name, row in rows.items():
        if name != "published_worst_error":
            assert row["error"] == pytest.approx(row["predicted"] / row["value"] - 1)
            assert abs(row["error"]) <= rows["published_worst_error"]["value"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # processes that are halved until they fit
def test_predictions_and_the_largest_model(tmp_path: Path) -> None:
    _, rows = run("predicted", tmp_path)
    assert {"predicted_one", "predicted_pipe2-2bw", "predicted_x2"} < set(rows)
    _, rows = run("largest", tmp_path)
    assert rows["largest_ratio"]["value"] >= 1
