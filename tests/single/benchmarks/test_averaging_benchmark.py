"""The averaging benchmark: its arithmetic is that of the methods, and every part has its rows."""

from __future__ import annotations

import importlib.util
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.averaging import training
from ganglion.decide.simulator.averaging import result as averaging_result
from ganglion.decide.simulator.averaging.costs import AveragingCosts, MessagePrice, jittered
from ganglion.decide.simulator.averaging.methods import METHODS
from ganglion.decide.simulator.averaging.simulate import simulate_averaging
from ganglion.execute.averaging.methods import metrics
from tests.support.command import python

COMMAND = ("-m", "benchmarks.averaging")
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


def images(number: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(number, 1, 28, 28, generator=draw)
    return pixels, torch.randint(10, (number,), generator=draw)


@pytest.mark.parametrize("name", ELASTIC)
def test_exchanges_keep_the_sum_of_all_weights(name: str) -> None:
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
def test_one_worker_is_the_plain_optimizer(name: str) -> None:
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


def test_versions_of_sync_easgd_differ_in_time_only() -> None:
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
    assert averaging_result.BREAKDOWN == metrics.BREAKDOWN


# --- the script ----------------------------------------------------------------------------------


def write_images(folder: Path) -> None:
    """Write a few images of two classes that are easy to tell apart, in MNIST's own files."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part, number in (("train", 256), ("t10k", 64)):
        labels = draw.integers(0, 2, number).astype(np.uint8)
        images = draw.integers(0, 60, (number, 28, 28)).astype(np.uint8)
        images[labels == 1, :14] += 150
        for kind, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", labels)):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{kind}-ubyte").write_bytes(header + array.tobytes())


@dataclass(frozen=True)
class Told:
    """What the script printed and wrote: all parts come from one run, at toy size."""

    machine: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    bars: list[dict[str, Any]]
    folder: Path

    def named(self, *names: str) -> dict[str, dict[str, Any]]:
        """Return rows, each of which must be there."""
        return {name: self.rows[name] for name in names}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("averaging")
    write_images(folder / "images")
    few = ("--quick", "--rounds", "1", "--steps", "3", "--target", "0.6", "--max-batches", "48")
    kept = ("--results", "kept.jsonl", "--plots", "plots", "--json")
    arguments = (*COMMAND, "--data", str(folder / "images"), *few, *kept)
    done = python(*arguments, cwd=folder, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    rows = {row["name"]: row for row in record["rows"]}
    return Told(record["machine"], rows, record["bars"], folder)


PAPER = {*METHODS, "original_easgd_packed"}
WALL_ONLY = ("round_robin", "sync_easgd_1_free_votes", "sync_easgd_2_free_votes")
# Measured exchanges of sync_measgd_3 would be those of sync_easgd_3.
WALL = {f"wall_{name}" for name in (*PAPER - {"sync_measgd_3"}, *WALL_ONLY)}
DDP = {"sync_easgd_tau_10", "torch_ddp", "two_alone"}
PACKING = {f"{way}_{n}" for way in ("packed", "apart") for n in (1, 16, 64)}
TORCHFT = {f"{ours}{name}_10" for ours in ("", "torchft_") for name in ("local_sgd", "diloco")}
has_torchft = importlib.util.find_spec("torchft") is not None


def test_every_part_has_its_rows(told: Told) -> None:
    scaling = {name for name, row in told.rows.items() if "nodes" in row}
    parts = PAPER | WALL | DDP | PACKING | (TORCHFT if has_torchft else set())
    assert set(told.rows) == parts | scaling
    for bar in told.bars:
        assert bar["measured"] == told.rows[bar["row"]][bar["measure"]]


def test_the_paper_part_has_every_method(told: Told) -> None:
    rows = told.named(*PAPER)
    assert rows["original_easgd"]["communication_share"] == pytest.approx(0.87, abs=0.02)
    for row in rows.values():
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert (row["ratio"] or 0) > 0 or row["reached"] < row["seeds"] or row["ratio_to"] is None
    shares = [rows[f"sync_easgd_{n}"]["communication_share"] for n in (1, 2, 3)]
    assert shares == sorted(shares, reverse=True) and shares[0] < 0.25
    assert {bar["row"] for bar in told.bars} >= {"sync_easgd_3", "async_easgd"}
    kept = (told.folder / "kept.jsonl").read_text().splitlines()
    assert len(kept) == 1 + 10  # costs, and each arithmetic once
    assert {path.suffix for path in (told.folder / "plots").iterdir()} == {".png"}


def test_the_wall_part_has_every_method_beside_its_simulation(told: Told) -> None:
    rows = told.named(*WALL)
    for row in rows.values():
        times = (row["low"], row["value"], row["high"], row["simulated"], row["to_simulated"])
        assert all(0 < time < float("inf") for time in times)
        assert 0 <= row["communication_share"] <= 1 and 0 <= row["simulated_share"] <= 1
        assert row["unit"] == "ms a batch" and len(row["values"]) == 1
    assert rows["wall_original_easgd"]["simulated_share"] == pytest.approx(0.87, abs=0.02)
    assert rows["wall_sync_easgd_3"]["ratio_to"] == "wall_original_easgd"
    assert "wall" in told.machine


def test_the_scaling_part_keeps_within_two_points(told: Told) -> None:
    rows = {name: row for name, row in told.rows.items() if "nodes" in row}
    bars = [bar for bar in told.bars if bar["row"] in rows]
    assert len(bars) == 5 and all(bar["met"] for bar in bars)
    assert {row["nodes"] for row in rows.values()} == {2, 4, 8, 16, 32, 64, 1024, 16384}


def test_the_parts_with_processes_have_their_figures(told: Told) -> None:
    rows = told.named(*DDP)
    assert rows["sync_easgd_tau_10"]["ratio_to"] == "torch_ddp"
    assert all(row["value"] > 0 and 0 <= row["accuracy"] <= 100 for row in rows.values())
    assert all(row["value"] > 0 for row in told.named(*PACKING).values())


def test_the_torchft_part_has_rows_or_says_why_not(told: Told) -> None:
    if has_torchft:
        assert all(row["value"] > 0 for row in told.named(*TORCHFT).values())
    else:
        assert "No module named 'torchft'" in told.machine["torchft"]
