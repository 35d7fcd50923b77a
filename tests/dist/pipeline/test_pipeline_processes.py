"""Pipelines over real processes: equal to serial, trained and resumed by the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ganglion import Plan
from ganglion.execute.comm import World, torch_world
from tests.support.command import TINY, ganglion, metrics_of, under_torchrun
from tests.support.harness import Ranks
from tests.support.pipelines import CASE, merged, plan_for, serial_of, train_at_once
from tests.support.serial import History, assert_same_history
from tests.support.training import Case, train_parallel


def train_on(world: World, plan: Plan, case: Case, transport: str) -> History:
    own = torch_world(world.rank, plan.mesh(), timeout_s=30.0, transport=transport)
    body = train_at_once if plan.schedule in ("two_bw", "stash") else train_parallel
    return body(own, plan, case)


@pytest.mark.parametrize(
    ("schedule", "pipe", "data", "m", "transport"),
    [
        ("one_f_one_b", 2, 1, 4, "shm"),
        ("one_f_one_b", 2, 1, 4, "torch"),
        ("message_driven", 3, 1, 4, "shm"),
        ("message_driven", 2, 2, 2, "shm"),
        ("interleaved", 2, 1, 4, "shm"),
        ("zero_bubble", 2, 1, 4, "shm"),
        ("zero_bubble_v", 2, 1, 4, "shm"),
        ("gpipe", 2, 1, 2, "torch"),
        ("two_bw", 2, 1, 4, "shm"),
        ("two_bw", 2, 2, 4, "shm"),
        ("two_bw", 4, 1, 4, "shm"),
        ("stash", 2, 1, 4, "shm"),
    ],
)
def test_processes_equal_serial(
    ranks: Ranks, schedule: str, pipe: int, data: int, m: int, transport: str
) -> None:
    is_stashed = schedule == "stash"  # whose stages never clip, as no moment is theirs together
    case = dataclasses.replace(CASE, max_grad_norm=0.0 if is_stashed else 0.3)
    cuts = (3,) if is_stashed else ()
    plan = plan_for(case, schedule, pipe, data, m, stage_boundaries=cuts)
    found = merged(ranks.run(plan.num_ranks, train_on, plan, case, transport), plan)
    assert_same_history(found, serial_of(plan, case), case.dtype)


@pytest.mark.parametrize("schedule", ["two_bw", "interleaved"])
def test_a_resumed_run_repeats_every_loss(tmp_path: Path, schedule: str) -> None:
    """And keeps the cut it measured; the whole run is given it, for it might measure another."""
    layers = [option if option != "1" else "2" for option in TINY]
    options = [*layers, "--nproc", "2", "--parallel.pipe", "2", "--parallel.schedule", schedule]
    options += ["--train.steps", "6", "--train.threads", "1", "--train.eval_every", "3"]
    part = ganglion("train", *options, "--output.dir", "part", "--train.stop_at", "3", cwd=tmp_path)
    assert part.returncode == 0, part.stderr
    (state,) = tmp_path.glob("part/checkpoints/*/state.json")
    cuts = json.dumps(json.loads(state.read_text())["plan"]["stage_boundaries"])
    rest = ganglion("train", "--resume", "--nproc", "2", "--output.dir", "part", cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    options += ["--parallel.stage_boundaries", cuts, "--output.dir", "whole"]
    whole = ganglion("train", *options, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    for key in ("loss", "grad_norm", "lr", "val_loss"):
        wanted = [record.get(key) for record in metrics_of(tmp_path / "whole")]
        assert [record.get(key) for record in metrics_of(tmp_path / "part")] == wanted


def test_pipe_by_data_trains_and_the_whole_model_is_written(tmp_path: Path) -> None:
    layers = [option if option != "1" else "2" for option in TINY]
    result = ganglion(
        *("train", *layers, "--nproc", "4", "--parallel.pipe", "2", "--parallel.data", "2"),
        *("--parallel.schedule", "two_bw", "--train.steps", "8", "--train.threads", "1"),
        *("--output.dir", "run"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    losses = [record["loss"] for record in metrics_of(tmp_path / "run")]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert "4 processes (data=2 x pipe=2)" in result.stdout
    assert "steps 4 to 8, two_bw" in result.stdout
    assert (tmp_path / "run" / "prediction.json").exists()
    names = set(load_file(tmp_path / "run" / "model.safetensors"))
    assert {"embedding.tokens.weight", "layers.1.mlp.up.weight", "head.norm.weight"} <= names


FORGOTTEN = """
import os, pathlib, signal, sys, time
import torch
import ganglion

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends when the other fails
plan = ganglion.Plan(pipe=2, microbatch_size=1, num_microbatches=2)
blocks = [torch.nn.Linear(4, 4) for _ in range(4)]
run = ganglion.parallelize(blocks, torch.nn.functional.mse_loss, torch.optim.SGD, plan)
list(run.steps([(torch.zeros(2, 4), torch.zeros(2, 4))]))
first = [os.getpid()]
torch.distributed.broadcast_object_list(first)
if run.world.rank == 0:
    print("trained", flush=True)
    if sys.argv[1] == "fails":
        raise ValueError("after the training")
else:
    status = pathlib.Path(f"/proc/{first[0]}/stat")
    while status.exists() and ") Z" not in status.read_text():
        time.sleep(0.01)
    executor, run = run._parts.executor, None
    print([t.poll() for t in executor._engine._alarm._all])
"""


@pytest.mark.parametrize("end", ["leaves", "fails"])
def test_a_rank_that_leaves_without_close_is_no_lost_peer(tmp_path: Path, end: str) -> None:
    """Unless it ends by an error."""
    (tmp_path / "train.py").write_text(FORGOTTEN)
    result = under_torchrun(2, "train.py", end, cwd=tmp_path)
    assert "trained" in result.stdout, result.stderr
    assert ("PeerLost: rank 0 is gone" in result.stderr) == (end == "fails"), result.stderr
