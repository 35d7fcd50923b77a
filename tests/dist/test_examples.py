"""The examples run as their first lines say, alone and in parallel, and continue where they were."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import DEADLINE_S, environment

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "own_loop.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def run_example(cwd: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(screen: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", screen)]


def test_alone_and_in_parallel_learn_the_same(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = losses(run_example(tmp_path / "one", SCRIPT))
    two = losses(run_example(tmp_path / "two", *TORCHRUN, *RENDEZVOUS, SCRIPT, "data=2"))
    assert len(alone) == 11
    assert alone[-1] < alone[0] / 4
    assert two == pytest.approx(alone, abs=0.02)
    again = run_example(tmp_path / "one", SCRIPT)
    assert "step 20 " not in again
    assert losses(again) == pytest.approx(alone[-1:], abs=1e-4)


TWICE = """
import torch
from torch import nn
import ganglion

for _ in range(2):
    plan = ganglion.Plan(data=2, microbatch_size=1)
    run = ganglion.parallelize([nn.Linear(1, 1)], nn.functional.mse_loss, torch.optim.AdamW, plan)
    print([r.step for r in run.steps([(torch.zeros(1, 1), torch.zeros(1, 1))])])
    run.close()
"""


def test_a_script_may_parallelize_twice(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    screen = run_example(tmp_path, *TORCHRUN, *RENDEZVOUS, "twice.py")
    assert screen.count("[1]") == 4
