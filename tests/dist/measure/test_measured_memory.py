"""A training tells at its end what its ranks held, beside what was predicted; budgets choose."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ganglion

SMALL = (
    *("--model.layers", "2", "--model.hidden", "32", "--model.heads", "2"),
    *("--data.kind", "synthetic", "--data.seq_len", "16"),
    *("--train.steps", "4", "--train.global_batch_size", "4", "--train.microbatch_size", "1"),
    *("--output.sample_tokens", "0", "--output.tensorboard", "false", "--output.dir", "run"),
)


def trained(folder: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """Train a small model; return what was printed, and `memory.json`."""
    done = ganglion("train", *SMALL, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((folder / "run" / "memory.json").read_text())
    return done.stdout, record


def test_every_rank_of_a_pipeline_is_told(tmp_path: Path) -> None:
    shown, record = trained(tmp_path, "--nproc", "2", "--parallel.pipe", "2")
    assert len(record["ranks"]) == 2 and record["keeps_freed"] and record["device"] == "cpu"
    for rank in record["ranks"]:
        for name in ("weights", "versions", "gradients", "master", "moments", "buckets"):
            assert rank["measured"][name] == rank["predicted"][name], name
        assert rank["measured"]["activations"] == pytest.approx(
            rank["predicted"]["activations"], rel=0.3
        )
        assert rank["predicted_peak"] == sum(rank["predicted"].values())
        assert rank["measured_peak"] > 0
    assert "memory of rank" in shown and "predicted " in shown and "measured " in shown
    assert "the peak holds freed memory too" in shown


def test_a_budget_is_chosen_for_told_and_written(tmp_path: Path) -> None:
    shown, record = trained(tmp_path, "--memory.device_gib", "1")
    assert "memory.device_gib = 1: nothing to be changed; predicted peak" in shown
    assert not record["keeps_freed"] and "holds freed memory" not in shown


def test_what_a_budget_chose_is_in_the_run_folder(tmp_path: Path) -> None:
    words = ("--model.hidden", "64", "--data.seq_len", "256", "--train.microbatch_size", "4")
    sizes = ("--train.steps", "1", "--memory.device_gib", "0.013")
    shown, record = trained(tmp_path, *words, *sizes)
    assert 'memory.device_gib = 0.013: memory.recompute = "full"' in shown
    resolved = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert resolved["memory"]["recompute"] == "full"
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["recompute"] == "full"
    assert record["ranks"][0]["predicted"]["recomputed"] > 0


def test_what_cannot_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = ganglion("train", *SMALL, "--memory.device_gib", "0.0001", cwd=tmp_path)
    assert done.returncode != 0
    assert "memory.device_gib = 0.0001 is too little: rank 0 needs" in done.stderr
    assert not (tmp_path / "run").exists()
