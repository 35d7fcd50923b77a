"""The averaging benchmark: its arithmetic is that of the methods, and every part has its rows."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ganglion.averaging import method
from ganglion.simulator import averaging_result
from ganglion.simulator.averaging import METHODS, simulate_averaging
from ganglion.simulator.averaging_costs import AveragingCosts, MessagePrice, jittered
from tests.command import python

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "averaging.py"
DEADLINE_S = 110
ELASTIC = [name for name, how in METHODS.items() if how.is_elastic]
LINK = MessagePrice(0.05, 1e-8)
COSTS = AveragingCosts(
    pass_s=jittered(1.0, 0.2, 3),
    update_s=0.01,
    host_center_s=0.3,
    host_link=LINK,
    device_link=LINK,
    tensor_bytes=(4, 4),
)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the benchmark's arithmetic as its script does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import averaging_training

    yield averaging_training
    for name in ("averaging_training", "harness"):
        sys.modules.pop(name, None)


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """Write a few images of two classes that are easy to tell apart, in MNIST's own files."""
    folder = tmp_path / "images"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part, number in (("train", 256), ("t10k", 64)):
        labels = draw.integers(0, 2, number).astype(np.uint8)
        images = draw.integers(0, 60, (number, 28, 28)).astype(np.uint8)
        images[labels == 1, :14] += 150
        for kind, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", labels)):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{kind}-ubyte").write_bytes(header + array.tobytes())
    return folder


def images(number: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(number, 1, 28, 28, generator=draw)
    return pixels, torch.randint(10, (number,), generator=draw)


@pytest.mark.parametrize("name", ELASTIC)
def test_exchanges_keep_the_sum_of_all_weights(name: str, training: ModuleType) -> None:
    setting = training.Setting(lr=0.0, beta=0.8, batch_size=2, num_workers=4, seed=0)
    run = training.Training(name, training.Gradients(images(), setting), setting)
    draw = torch.Generator().manual_seed(1)
    for worker in run._workers:
        worker.add_(torch.randn(worker.shape, generator=draw))
    before = run.center + sum(run._workers)
    spread = torch.stack(run._workers).std(0).mean()
    events = simulate_averaging(name, COSTS, num_workers=4, num_batches=16).events
    assert sum(run.apply(event) for event in events) == 16
    after = run.center + sum(run._workers)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert torch.stack(run._workers).std(0).mean() < 0.9 * spread


@pytest.mark.parametrize("name", ["async_sgd", "hogwild_sgd", "sync_sgd", "async_msgd"])
def test_one_worker_is_the_plain_optimizer(name: str, training: ModuleType) -> None:
    setting = training.Setting(lr=0.05, beta=0.9, batch_size=4, num_workers=1, seed=0)
    run = training.Training(name, training.Gradients(images(), setting), setting)
    for event in simulate_averaging(name, COSTS, num_workers=1, num_batches=5).events:
        run.apply(event)
    gradients = training.Gradients(images(), setting)
    weights = gradients.initial.clone().requires_grad_()
    momentum = 0.9 if name == "async_msgd" else 0.0
    optimizer = torch.optim.SGD([weights], lr=0.05, momentum=momentum)
    for _ in range(5):
        weights.grad = gradients.at(weights.detach(), 0).clone()
        optimizer.step()
    torch.testing.assert_close(run.center, weights.detach(), atol=1e-6, rtol=1e-5)


def test_versions_of_sync_easgd_differ_in_time_only(training: ModuleType) -> None:
    setting = training.Setting(lr=0.05, beta=0.9, batch_size=2, num_workers=2, seed=0)
    centers = []
    for name in ("sync_easgd_1", "sync_easgd_2", "sync_easgd_3"):
        run = training.Training(name, training.Gradients(images(), setting), setting)
        for event in simulate_averaging(name, COSTS, num_workers=2, num_batches=6).events:
            run.apply(event)
        centers.append(run.center)
    assert torch.equal(centers[0], centers[1]) and torch.equal(centers[1], centers[2])
    assert not torch.equal(centers[0], training.Gradients(images(), setting).initial)


def test_the_clock_names_times_as_the_methods_do() -> None:
    assert averaging_result.BREAKDOWN == method.BREAKDOWN


def report(folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Run the script; return the JSON it prints, and its rows by name."""
    arguments = (str(SCRIPT), "--quick", "--json", "--rounds", "1", *options)
    done = python(*arguments, cwd=folder, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    rows = {row["name"]: row for row in record["rows"]}
    for bar in record["bars"]:
        assert bar["measured"] == rows[bar["row"]][bar["measure"]]
    return record, rows


def test_the_paper_part_has_every_method(tmp_path: Path, idx_folder: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    options = ("--part", "paper", "--data", str(idx_folder), "--target", "0.6")
    few = ("--max-batches", "48", "--results", str(kept), "--plots", str(tmp_path / "plots"))
    record, rows = report(tmp_path, *options, *few)
    assert set(rows) == {*METHODS, "original_easgd_packed"}
    assert rows["original_easgd"]["communication_share"] == pytest.approx(0.87, abs=0.02)
    for row in rows.values():
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert (row["ratio"] or 0) > 0 or row["reached"] < row["seeds"] or row["ratio_to"] is None
    shares = [rows[f"sync_easgd_{n}"]["communication_share"] for n in (1, 2, 3)]
    assert shares == sorted(shares, reverse=True) and shares[0] < 0.25
    assert {bar["row"] for bar in record["bars"]} >= {"sync_easgd_3", "async_easgd"}
    assert len(kept.read_text().splitlines()) == 1 + 10  # costs, and each arithmetic once
    assert {path.suffix for path in (tmp_path / "plots").iterdir()} == {".png"}


def test_the_wall_part_has_every_method_beside_its_simulation(
    tmp_path: Path, idx_folder: Path
) -> None:
    record, rows = report(tmp_path, "--part", "wall", "--data", str(idx_folder))
    free = ("sync_easgd_1_free_votes", "sync_easgd_2_free_votes")
    others = ("original_easgd_packed", "round_robin", *free)
    methods = set(METHODS) - {"sync_measgd_3"}  # exchanges as sync_easgd_3 does
    assert set(rows) == {f"wall_{name}" for name in (*methods, *others)}
    for row in rows.values():
        times = (row["low"], row["value"], row["high"], row["simulated"], row["to_simulated"])
        assert all(0 < time < float("inf") for time in times)
        assert 0 <= row["communication_share"] <= 1 and 0 <= row["simulated_share"] <= 1
        assert row["unit"] == "ms a batch" and len(row["values"]) == 1
    assert rows["wall_original_easgd"]["simulated_share"] == pytest.approx(0.87, abs=0.02)
    assert rows["wall_sync_easgd_3"]["ratio_to"] == "wall_original_easgd"
    assert "wall" in record["machine"]


def test_the_scaling_part_keeps_within_two_points(tmp_path: Path) -> None:
    record, rows = report(tmp_path, "--part", "scaling")
    assert len(record["bars"]) == 5 and all(bar["met"] for bar in record["bars"])
    assert {row["nodes"] for row in rows.values()} == {2, 4, 8, 16, 32, 64, 1024, 16384}


def test_the_parts_with_processes_have_their_rows(tmp_path: Path, idx_folder: Path) -> None:
    few = ("--data", str(idx_folder), "--steps", "3")
    _, rows = report(tmp_path, "--part", "ddp", *few)
    assert set(rows) == {"sync_easgd_tau_10", "torch_ddp", "two_alone"}
    assert rows["sync_easgd_tau_10"]["ratio_to"] == "torch_ddp"
    assert all(row["value"] > 0 and 0 <= row["accuracy"] <= 100 for row in rows.values())
    _, rows = report(tmp_path, "--part", "packing")
    assert set(rows) == {f"{way}_{n}" for way in ("packed", "apart") for n in (1, 16, 64)}


def test_the_torchft_part_has_rows_or_says_why_not(tmp_path: Path, idx_folder: Path) -> None:
    few = ("--data", str(idx_folder), "--steps", "3")
    told, rows = report(tmp_path, "--part", "torchft", *few)
    if importlib.util.find_spec("torchft") is None:
        assert rows == {}
        assert "No module named 'torchft'" in str(told)
    else:
        names = ("local_sgd_10", "diloco_10")
        assert set(rows) == {*names, *(f"torchft_{name}" for name in names)}
