"""`ganglion train` from end to end: alone, under torchrun and srun, stopped, resumed, refused."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from ganglion import Plan
from ganglion.decide.config import load_run_file, read_toml, resolve
from tests.support.command import (
    DEADLINE_S,
    TINY,
    cold,
    environment,
    free_port,
    ganglion,
    metrics_of,
)
from tests.support.warm_process import WarmProcess

METRICS = {"step", "loss", "grad_norm", "tokens_per_s", "step_s", "lr", "peak_bytes"}
TWO = ["train", *TINY, "--nproc", "2"]


TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", "torchrun"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "ganglion"),
]


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(folder)]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two processes that nothing interrupts: its folder and what it printed."""
    cwd = tmp_path_factory.mktemp("whole")
    result = ganglion(*TWO, "--train.steps", "8", "--output.dir", "run", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return cwd / "run", result.stdout


def test_the_run_folder_is_complete(whole_run: tuple[Path, str]) -> None:
    folder, _ = whole_run
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names >= {
        "run.toml",
        "plan.json",
        "metrics.jsonl",
        "model.safetensors",
        "trace/rank0.jsonl",
        "trace/rank1.jsonl",
        "logs/rank0.log",
        "logs/rank1.log",
        "checkpoints/step-00000008/state.json",
        "checkpoints/step-00000008/model.safetensors",
    }
    assert json.loads((folder / "plan.json").read_text())["data"] == 2
    log = (folder / "logs" / "rank1.log").read_text()
    assert "rank 1 of 2, started by torchrun" in log
    assert "checkpoints/step-00000008" in log


def test_metrics_have_every_key_every_step(whole_run: tuple[Path, str]) -> None:
    records = metrics_of(whole_run[0])
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all(set(record) - {"val_loss"} == METRICS for record in records)
    assert all(record["peak_bytes"] > 0 and record["grad_norm"] > 0 for record in records)
    assert "val_loss" in records[-1]


def test_the_screen_tells_the_story(whole_run: tuple[Path, str]) -> None:
    _, screen = whole_run
    for part in ("2 processes (data=2)", "step 1/8", "step 8/8", "tokens/s", "% of peak", "left"):
        assert part in screen
    assert "run folder: run" in screen
    assert "INFO" not in screen


def test_the_trace_has_every_action(whole_run: tuple[Path, str]) -> None:
    lines = (whole_run[0] / "trace" / "rank1.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    per_step = {kind: sum(e["kind"] == kind and e["step"] == 3 for e in events) for kind in
                ("forward", "backward", "reduce", "update", "agree")}  # fmt: skip
    assert per_step["forward"] == per_step["backward"] == 2
    assert per_step["reduce"] >= 1 and per_step["update"] == per_step["agree"] == 1


def test_stopped_and_resumed_equals_never_stopped(
    whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    options = ["--train.steps", "8", "--output.dir", "run"]
    stopped = ganglion(*TWO, *options, "--train.stop_at", "3", cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert "continue with: ganglion train --resume --output.dir run" in stopped.stdout
    assert len(losses_of(tmp_path / "run")) == 3
    resumed = ganglion("train", "--resume", "--output.dir", "run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "2 processes" in resumed.stdout
    assert losses_of(tmp_path / "run") == losses_of(whole_run[0])


def test_another_number_of_processes_sees_the_same_batches(
    whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    options = ["--train.steps", "8", "--output.dir", "run", "--nproc", "1"]
    result = ganglion("train", *TINY, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(whole_run[0]), rel=1e-4)


def test_torchrun(whole_run: tuple[Path, str], tmp_path: Path) -> None:
    options = ["train", *TINY, "--train.steps", "8", "--output.dir", "run"]
    result = cold(*TORCHRUN, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert losses_of(tmp_path / "run") == losses_of(whole_run[0])
    assert result.stdout.count("run folder:") == 1


def slurm_task(rank: int, port: int, cwd: Path) -> WarmProcess:
    """Start one task with the variables that srun sets."""
    variables = {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_PORT": str(port),
    }
    options = [*TINY, "--train.steps", "8", "--train.timeout_s", "10", "--output.dir", "run"]
    return WarmProcess(["-m", "ganglion", "train", *options], cwd, environment(**variables))


def test_srun(whole_run: tuple[Path, str], tmp_path: Path) -> None:
    port = free_port()
    tasks = [slurm_task(rank, port, tmp_path) for rank in range(2)]
    outputs = [task.communicate(timeout=DEADLINE_S) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert losses_of(tmp_path / "run") == losses_of(whole_run[0])


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        task = slurm_task(0, port, tmp_path)
        _, errors = task.communicate(timeout=DEADLINE_S)
    assert task.returncode == 2
    assert f"port {port} is in use on localhost: set MASTER_PORT to a free port" in errors


def test_a_wrong_world_size_is_refused_before_anything_starts(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    env = environment(**variables, MASTER_ADDR="localhost", MASTER_PORT="1")
    result = ganglion("train", *TINY, "--parallel.data", "2", cwd=tmp_path, env=env)
    assert result.returncode == 2
    assert "= 2 processes, but 3 were started" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plan_file_is_followed_and_recorded(tmp_path: Path) -> None:
    plan = Plan(data=1, microbatch_size=4, num_microbatches=2, precision="bf16")
    (tmp_path / "p.json").write_text(plan.to_json())
    (tmp_path / "my.toml").write_text("[train]\nglobal_batch_size = 8\n")
    options = ["--train.steps", "2", "--train.stop_at", "1", "--plan", "p.json"]
    tiny = [*TINY[:10], *TINY[14:]]  # all but the batch, which the plan and my.toml decide
    result = ganglion("train", "my.toml", *tiny, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    file = load_run_file(read_toml(folder / "run.toml"))
    assert resolve(file) == plan
    resumed = ganglion("train", "my.toml", *tiny, "--train.steps", "2", "--plan", "p.json",
                       "--resume", cwd=tmp_path)  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses_of(folder)) == 2


def test_ctrl_c_under_torchrun_stops_cleanly(tmp_path: Path) -> None:
    options = ["train", *TINY, "--train.steps", "100000", "--output.dir", "run"]
    process = WarmProcess([*TORCHRUN, *options], tmp_path, environment())
    metrics = tmp_path / "run" / "metrics.jsonl"
    end_s = time.monotonic() + DEADLINE_S
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    done = len(losses_of(tmp_path / "run"))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done:08d}"]


def test_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    options = ["--train.steps", "5", "--checkpoint.every", "1", "--checkpoint.keep", "2"]
    result = ganglion(*TWO, *options, "--output.dir", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000005"]
