"""The tensor benchmark runs and has every row it promises, in the form that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import python

COMMAND = ("-m", "benchmarks.tensor")
DEADLINE_S = 110
PEERS = {"x2": "dtensor_tp", "z2": "fsdp2", "z2_keep": "fsdp2_keep"}
OVERLAPS = ("overlap_none", "overlap_oar", "overlap_oar_ors", "overlap_oar_ors_oag")


def run(part: str, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Run it with one timed step a turn; return the JSON it prints, and its rows by name."""
    options = ("--quick", "--rounds", "1", "--steps", "1", "--json", "--part", part)
    done = python(*COMMAND, *options, cwd=folder, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["machine"]["cores"] >= 1 and record["machine"]["quick"]
    assert list(folder.iterdir()) == []
    rows = {row["name"]: row for row in record["rows"]}
    assert all(0 < row["low"] <= row["value"] <= row["high"] for row in rows.values())
    for bar in record["bars"]:
        assert bar["measured"] == rows[bar["row"]][bar["measure"]]
        assert bar["met"] == (bar["measured"] >= bar["bar"])
    return record, rows


def test_every_row_of_the_real_model_is_there(tmp_path: Path) -> None:
    record, rows = run("real", tmp_path)
    assert set(rows) == {"ideal", *PEERS, *PEERS.values()}
    ideal = rows["ideal"]
    for name, row in rows.items():
        assert row["unit"] == "tokens/s" and row["ratio_to"] == PEERS.get(name)
        assert row["share_of_ideal"] == row["value"] / ideal["value"]
        assert row["first_loss"] == pytest.approx(ideal["first_loss"], rel=1e-5)
        assert row["second_loss"] < row["first_loss"]
    for ours, peer in PEERS.items():
        assert rows[ours]["ratio"] == rows[ours]["value"] / rows[peer]["value"]
    wanted = {*((name, "ratio") for name in PEERS), *((name, "share_of_ideal") for name in PEERS)}
    assert {(bar["row"], bar["measure"]) for bar in record["bars"]} == wanted


@pytest.mark.slow
def test_every_row_of_the_overlaps_is_there(tmp_path: Path) -> None:
    record, rows = run("overlap", tmp_path)
    assert tuple(rows) == OVERLAPS
    first, last = rows[OVERLAPS[0]], rows[OVERLAPS[-1]]
    for row in rows.values():
        assert row["unit"] == "s"
        assert row["exposed_s"] == row["value"] - row["compute_s"]
        # Sleeps never end early, and a step without overlap waits for every byte.
        assert row["compute_s"] >= 0.15
    assert first["exposed_s"] >= 0.15 * first["paper_exposed_s"] / first["paper_compute_s"]
    assert last["exposed_fall"] == 1 - last["exposed_s"] / first["exposed_s"]
    assert last["ratio_to"] == OVERLAPS[0] and last["ratio"] == first["value"] / last["value"]
    assert {bar["measure"] for bar in record["bars"]} == {"exposed_fall", "total_fall"}
