"""The pipeline benchmark runs and has every row it promises, in the form that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import python

COMMAND = ("-m", "benchmarks.pipeline")
DEADLINE_S = 110
GANGLION = (
    *("two_bw", "message_driven", "one_f_one_b"),
    *("interleaved", "zero_bubble", "zero_bubble_v"),
)
TORCH = (
    *("torch_1f1b", "torch_1f1b_kept_memory"),
    *("torch_gpipe", "torch_interleaved", "torch_zbv"),
)
VIRTUAL = ("torch_1f1b", "one_f_one_b", "message_driven", "two_bw")


def run(*arguments: str, folder: Path) -> dict[str, Any]:
    """Run it with one timed step a turn; return the JSON it prints."""
    done = python(
        *COMMAND,
        "--quick",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--json",
        *arguments,
        cwd=folder,
        deadline_s=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["machine"]["cores"] >= 1 and record["machine"]["quick"]
    assert list(folder.iterdir()) == []
    return record


def rows_of(record: dict[str, Any], unit: str) -> dict[str, dict[str, Any]]:
    """Return the rows by name, after a look at what all have in common."""
    rows = {row["name"]: row for row in record["rows"]}
    for row in rows.values():
        assert row["unit"] == unit
        assert 0 < row["low"] <= row["value"] <= row["high"]
        if row["ratio_to"] is not None:
            ratio = row["value"] / rows[row["ratio_to"]]["value"]
            assert row["ratio"] == pytest.approx(ratio if unit == "tokens/s" else 1 / ratio)
    return rows


def assert_bars(record: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    for bar in record["bars"]:
        assert bar["measured"] == rows[bar["row"]][bar["measure"]]
        at_most = bar["measure"] in ("over_theory", "cost_ms")
        met = bar["measured"] <= bar["bar"] if at_most else bar["measured"] >= bar["bar"]
        assert bar["met"] == met


def test_every_row_of_the_real_model_is_there(tmp_path: Path) -> None:
    record = run("--part", "real", folder=tmp_path)
    rows = rows_of(record, "tokens/s")
    assert set(rows) == {"ideal", *GANGLION, *TORCH}
    assert rows["torch_1f1b"]["ratio_to"] is None
    assert all(rows[name]["ratio_to"] == "torch_1f1b" for name in GANGLION)
    assert rows["interleaved"]["peer"] == "torch_interleaved"
    assert rows["one_f_one_b"]["first_cut"] >= 1 and rows["torch_1f1b"]["first_cut"] is None
    ideal = rows["ideal"]["value"]
    assert rows["two_bw"]["share_of_ideal"] == rows["two_bw"]["value"] / ideal
    assert {bar["row"] for bar in record["bars"]} == set(GANGLION)
    assert_bars(record, rows)


@pytest.mark.slow
def test_every_row_of_the_sleeping_stages_is_there(tmp_path: Path) -> None:
    record = run("--part", "virtual", "--ranks", "2", folder=tmp_path)
    rows = rows_of(record, "s")
    assert set(rows) == {f"virtual_2_{way}" for way in VIRTUAL}
    for name, row in rows.items():
        assert row["ratio_to"] == (None if name.endswith("torch_1f1b") else "virtual_2_torch_1f1b")
        assert row["over_theory"] == row["value"] / row["theoretical_s"]
        assert row["cost_ms"] > 0
        assert 1 <= row["peak_live"] <= row["cap"]
    # 2 ranks, 4 microbatches: (m + p - 1) x 30 ms flushed, m x 30 ms in a pipeline that stays full.
    assert rows["virtual_2_torch_1f1b"]["theoretical_s"] == pytest.approx(0.150)
    assert rows["virtual_2_two_bw"]["theoretical_s"] == pytest.approx(0.120)
    assert [rows[f"virtual_2_{way}"]["cap"] for way in VIRTUAL] == [2, 2, 4, 4]


@pytest.mark.slow
def test_every_row_with_jitter_is_there(tmp_path: Path) -> None:
    rows = rows_of(run("--part", "jitter", "--ranks", "2", folder=tmp_path), "s")
    assert set(rows) == {f"jitter_2_{way}" for way in (*VIRTUAL, "two_bw_2p")}
    assert rows["jitter_2_message_driven"]["cap"] == 4
    assert all(row["peak_live"] <= row["cap"] for row in rows.values())
