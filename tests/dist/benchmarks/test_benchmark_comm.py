"""The communication benchmark runs, has every row it promises, and leaves nobody behind."""

from __future__ import annotations

import json
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command import environment, python
from tests.support.warm_python import SERVERS, warm_python

COMMAND = ("-m", "benchmarks.comm")
DEADLINE_S = 110
SMALL, LARGE = ("64b", "1kb", "64kb", "1mb"), ("16mb", "64mb", "256mb")
SENDERS = ["shm", "gloo", "torch", *(["mpich", "mpi"] if find_spec("mpi4py") else [])]
PEERS = [name for name in SENDERS if name in ("gloo", "mpich")]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def promised(*sizes: str) -> set[str]:
    """Return the names of all rows of these sizes."""
    names = {
        f"{way}_send_{size}{variant}"
        for way in SENDERS
        for size in sizes
        for variant in ("", "_read", "_computing")
    }
    for num_ranks, of_them in ((2, ("1kb", "1mb", "64mb")), (4, ("1kb", "1mb", "16mb"))):
        for size in set(of_them) & set(sizes):
            names |= {f"{w}_{v}_{size}_{num_ranks}" for w in ["shm", *PEERS] for v in COLLECTIVES}
            if size != "1kb":
                names.add(f"shm_all_reduce_{size}_{num_ranks}_allocated")
    return names


def run(*arguments: str, folder: Path) -> dict[str, Any]:
    """Run it with one message a turn; return the JSON it prints."""
    done = python(
        *COMMAND,
        "--rounds",
        "1",
        "--repetitions",
        "1",
        "--json",
        *arguments,
        cwd=folder,
        deadline_s=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def check(record: dict[str, Any], names: set[str]) -> None:
    rows = {row["name"]: row for row in record["rows"]}
    assert set(rows) == names
    for name, row in rows.items():
        assert row["unit"] == "us" and row["repetitions"] == 1
        assert row["low"] <= row["value"] <= row["high"]
        assert row["value"] > 0 or name.endswith("_computing")  # a difference of two times
        if name.startswith("shm_") and not name.endswith("_computing"):
            assert [row[f"ratio_to_{peer}"] > 0 for peer in PEERS] == [True] * len(PEERS)
    assert record["machine"]["cores"] >= 1


def test_every_row_is_there(tmp_path: Path) -> None:
    record = run("--quick", "--largest", "1mb", folder=tmp_path)
    check(record, promised(*SMALL))
    rows = {row["name"]: row for row in record["rows"]}
    bars = {(bar["row"], bar["measure"]): bar for bar in record["bars"]}
    assert bars["shm_send_1kb", "value"]["bar"] == 60
    assert bars["shm_all_gather_1mb_2", "value"]["bar"] == 600
    assert bars["shm_reduce_scatter_1mb_4", "ratio_to_gloo"]["bar"] == 3
    assert len(bars) == 2 + len(SMALL) + 2 * len(COLLECTIVES) + len(COLLECTIVES)
    for (name, measure), bar in bars.items():
        assert bar["measured"] == rows[name][measure]
        is_met = (
            bar["measured"] <= bar["bar"] if measure == "value" else bar["measured"] >= bar["bar"]
        )
        assert bar["met"] == is_met
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_every_row_of_every_size_is_there(tmp_path: Path) -> None:
    record = run("--quick", folder=tmp_path)
    check(record, promised(*SMALL, *LARGE))
    assert len(record["bars"]) == 2 + len(SMALL + LARGE) + 4 * len(COLLECTIVES)


def test_its_ranks_die_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [warm_python(), *COMMAND, "--quick"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert process.stderr is not None
    try:
        while (line := process.stderr.readline()) != "2 ranks: round 1 of 2\n":
            assert line, "the benchmark ended before its first round"
        started = psutil.Process(SERVERS[0].pid).children(recursive=True)
        assert len(started) >= 4  # itself and two ranks, with watchers
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    assert psutil.wait_procs(started, timeout=20)[1] == []
