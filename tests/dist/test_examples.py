"""The examples run as their first lines say, alone and in parallel, and go on where they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ganglion.decide.schedules.pipeline import SCHEDULES
from tests.support.command import python, under_torchrun

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "own_loop.py")
TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", "torchrun"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
]


def run_example(cwd: Path, *arguments: str, num_ranks: int = 1) -> str:
    """Run a script on its own, or on several ranks; return what was printed."""
    if num_ranks == 1:
        result = python(*arguments, cwd=cwd)
    else:
        result = under_torchrun(num_ranks, *arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(screen: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", screen)]


def test_alone_and_in_parallel_learn_the_same(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = losses(run_example(tmp_path / "one", SCRIPT))
    two = losses(run_example(tmp_path / "two", SCRIPT, "data=2", num_ranks=2))
    assert len(alone) == 11
    assert alone[-1] < alone[0] / 4
    assert two == pytest.approx(alone, abs=0.02)
    again = run_example(tmp_path / "one", SCRIPT)
    assert "step 20 " not in again
    assert losses(again) == pytest.approx(alone[-1:], abs=1e-4)


# Runs the script once for each schedule, and not to its end: starting and waiting take long.
EVERY_SCHEDULE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import own_loop

own_loop.STEPS = 60
pipe, *schedules = sys.argv[2:]
for name in schedules:
    os.makedirs(name, exist_ok=True)
    os.chdir(name)
    sys.argv = ["own_loop.py", "pipe=" + pipe, "schedule=" + name]
    if os.environ.get("RANK", "0") == "0":
        print("schedule", name, flush=True)
    own_loop.main()
    os.chdir("..")
"""
FLUSHING = [name for name in SCHEDULES if name not in ("two_bw", "stash")]


def losses_by_schedule(screen: str) -> dict[str, list[float]]:
    _, *parts = screen.split("schedule ")
    return {part.split()[0]: losses(part) for part in parts}


def test_the_own_loop_as_a_pipeline_with_every_schedule(tmp_path: Path) -> None:
    """Same losses as alone: under two_bw as alone with its delay; stash has a delay of its own."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "every.py").write_text(EVERY_SCHEDULE)
    words = ("every.py", str(ROOT / "examples"))
    screen = run_example(tmp_path / "one", *words, "1", "one_f_one_b", "two_bw")
    alone = losses_by_schedule(screen)
    screen = run_example(tmp_path / "two", *words, "2", *SCHEDULES, num_ranks=2)
    found = losses_by_schedule(screen)
    assert list(found) == list(SCHEDULES)
    for name in FLUSHING:
        assert found[name] == pytest.approx(alone["one_f_one_b"], abs=1e-3), name
    assert found["two_bw"] == pytest.approx(alone["two_bw"], abs=1e-3)
    assert found["two_bw"] != pytest.approx(alone["one_f_one_b"], abs=1e-3)
    assert found["stash"][-1] < 0.8 * found["stash"][0]


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
    result = python(*TORCHRUN, "twice.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("[1]") == 4
