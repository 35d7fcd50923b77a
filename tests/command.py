"""Running the command line as a user does: as a process, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 100
# A model and a data set small enough that starting the processes is all the time it takes.
TINY = [
    *("--model.layers", "1", "--model.hidden", "16", "--model.heads", "2"),
    *("--data.kind", "synthetic", "--data.seq_len", "8"),
    *("--train.global_batch_size", "8", "--train.microbatch_size", "2"),
    *("--output.tensorboard", "false", "--train.eval_every", "0", "--checkpoint.every", "0"),
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
    """Run `python ...` and return what it printed and its exit code."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env or environment(),
        timeout=deadline_s,
    )


def start_ganglion(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start `ganglion ...` without waiting for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "ganglion", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(),
        **options,
    )


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
