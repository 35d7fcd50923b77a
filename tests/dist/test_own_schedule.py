"""A schedule of the user's own: the example draws and trains, and every command accepts it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.dist.test_examples import ROOT, losses, run_example
from tests.support.command import TINY, ganglion, metrics_of

SCRIPT = str(ROOT / "examples" / "own_schedule.py")
EAGER = "own_schedule:Eager"
BROKEN = """
from own_schedule import Eager

class Broken(Eager):
    def _list(self, num_microbatches):
        return super()._list(num_microbatches)[::-1]

def nothing(rank, num_ranks):
    return 42
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def test_the_example_draws_and_learns_alone_and_as_a_pipeline(tmp_path: Path) -> None:
    alone = run_example(tmp_path, SCRIPT)
    bubbles = [float(line.split()[2]) for line in alone.splitlines() if "bubble" in line]
    assert len(bubbles) == 2
    assert bubbles[0] < bubbles[1], "the messages are hidden better than by one_f_one_b"
    assert "  0  0123456..." in alone
    two = losses(run_example(tmp_path, SCRIPT, "pipe=2", num_ranks=2))
    assert losses(alone) == pytest.approx(two, abs=2e-4)
    assert two[-1] < two[0] / 10


def test_it_can_be_drawn_and_simulated_by_the_commands(folder: Path) -> None:
    words = ["schedule", EAGER, "--latency-s", "0.25", "--compare", "1f1b", "--json"]
    drawn = ganglion(*words, "--stages", "4", "--microbatches", "8", cwd=folder)
    assert drawn.returncode == 0, drawn.stderr
    eager, other = json.loads(drawn.stdout)
    assert (eager["name"], other["name"]) == (EAGER, "one_f_one_b")
    assert eager["bubble"] < other["bubble"]
    assert eager["peak_live"] == [7, 5, 3, 1]
    (folder / "run.toml").write_text(f'[parallel]\npipe = 2\nschedule = "{EAGER}"\n')
    words = ["simulate", "run.toml", "--cluster", "laptop", "--json"]
    simulated = ganglion(*words, cwd=folder)
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout)["schedule"] == EAGER


def test_it_trains_with_the_losses_of_one_f_one_b(folder: Path) -> None:
    common = [*TINY, "--nproc", "2", "--parallel.pipe", "2", "--train.steps", "3"]
    for name, where in ((EAGER, "eager"), ("1f1b", "usual")):
        words = [*common, "--parallel.schedule", name, "--output.dir", where]
        result = ganglion("train", *words, "--parallel.stage_boundaries", "[2]", cwd=folder)
        assert result.returncode == 0, result.stderr
    eager, usual = (metrics_of(folder / where) for where in ("eager", "usual"))
    assert [one["loss"] for one in eager] == [one["loss"] for one in usual]
    assert json.loads((folder / "eager" / "plan.json").read_text())["schedule"] == EAGER


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["schedule", "eager"], "schedule = 'eager' is not a schedule"),
        (["schedule", "nowhere:Eager"], "schedule = 'nowhere:Eager': there is no module 'nowhere'"),
        (["schedule", "own_schedule:main"], "is called as (rank, num_ranks), but takes"),
        (["schedule", "broken:nothing"], "made a int, not a schedule"),
        (["schedule", "broken:Broken"], "schedule = 'broken:Broken' breaks a law of schedules"),
        (
            ["train", *TINY, "--parallel.schedule", "broken:Broken", "--parallel.pipe", "2"],
            "parallel.schedule = 'broken:Broken' breaks a law of schedules with 2 ranks and 4",
        ),
        (
            ["train", *TINY, "--parallel.schedule", EAGER, "--parallel.limit", "2"],
            f"parallel.limit = 2 means nothing to parallel.schedule = '{EAGER}'",
        ),
    ],
)
def test_refused_in_one_line_before_anything_starts(
    folder: Path, words: list[str], text: str
) -> None:
    result = ganglion(*words, cwd=folder)
    assert result.returncode == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (folder / "runs").exists()
