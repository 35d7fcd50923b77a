"""Running the command line as a user does: as a process, in a folder of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.warm_process import WarmProcess

DEADLINE_S = 100
# A model and a data set small enough that starting the processes is all the time it takes.
TINY = [
    *("--model.layers", "1", "--model.hidden", "16", "--model.heads", "2"),
    *("--data.kind", "synthetic", "--data.seq_len", "8"),
    *("--train.global_batch_size", "8", "--train.microbatch_size", "2"),
    *(
        "--train.threads",
        "1",
        "--output.tensorboard",
        "false",
        "--train.eval_every",
        "0",
        "--checkpoint.every",
        "0",
    ),
]


def environment(**extra: str) -> dict[str, str]:
    """Return an environment in which the project can be imported from anywhere.

    One thread a process: two that wait for each other spin, and on a busy machine for long.
    """
    root = str(Path(__file__).parents[2])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # has mpiexec
    return {**os.environ, "PATH": path, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **extra}


def ganglion(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ganglion ...` and return its output and exit code."""
    return python("-m", "ganglion", *arguments, cwd=cwd, env=env)


def python(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run `python ...` as a warm process; return its output and exit code."""
    process = WarmProcess(arguments, cwd, env or environment())
    try:
        output, errors = process.communicate(deadline_s)
    finally:
        end_with_children(process)
    return subprocess.CompletedProcess(arguments, process.wait(), output, errors)


def under_torchrun(
    num_ranks: int, *arguments: str, cwd: Path, deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run `python ...` once for each rank, in the environment that torchrun gives them."""
    port = free_port()
    ranks = [
        WarmProcess(arguments, cwd, environment(**torchrun_variables(rank, num_ranks, port)))
        for rank in range(num_ranks)
    ]
    try:
        printed = [rank.communicate(deadline_s) for rank in ranks]
    finally:
        for rank in ranks:
            end_with_children(rank)
    output, errors = ("".join(texts) for texts in zip(*printed, strict=True))
    return subprocess.CompletedProcess(arguments, max(r.wait() for r in ranks), output, errors)


def torchrun_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of one host."""
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(num_ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0"},
    }


def free_port() -> int:
    """Return a port that nothing listens to at this moment."""
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def cold(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run `python ...` in an interpreter of its own, for tests of the start of a process."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env or environment(),
        timeout=deadline_s,
    )


def start_cold(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `python ...` in an interpreter of its own, without waiting for it."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(),
    )


def start_ganglion(*arguments: str, cwd: Path) -> WarmProcess:
    """Start `ganglion ...` without waiting for it."""
    return WarmProcess(["-m", "ganglion", *arguments], cwd, environment())


def end_with_children(process: WarmProcess) -> None:
    """Kill a process that has not ended, and all that it started."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait(10)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def alive(pids: list[int]) -> list[int]:
    """Return those of the processes that still run."""
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
