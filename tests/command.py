"""Running the command line as a user does: as a process, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.warm import WarmProcess

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
    """Return an environment in which the project can be imported from anywhere."""
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, **extra}


def ganglion(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ganglion ...` and return what it printed and its exit code."""
    return python("-m", "ganglion", *arguments, cwd=cwd, env=env)


def python(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run `python ...` as a warm process; return what it printed and its exit code."""
    process = WarmProcess(arguments, cwd, env or environment())
    try:
        output, errors = process.communicate(deadline_s)
    finally:
        end_with_children(process)
    return subprocess.CompletedProcess(arguments, process.wait(), output, errors)


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
