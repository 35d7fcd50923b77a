"""`ganglion plan`, `ganglion why`, and training with --plan auto."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ganglion
from ganglion.decide.plan import Plan
from ganglion.decide.planner import read_measured
from tests.support.answers import TorchlessCommand
from tests.support.answers import ganglion as answer

RUN = """
[model]
layers = 2
hidden = 32
heads = 2
[data]
kind = "synthetic"
seq_len = 16
[train]
steps = 8
global_batch_size = 8
microbatch_size = 2
[output]
dir = "out"
"""
SUMMIT = ("gpt-2.2b", "--cluster", "summit", "--gpus", "12", "--batch", "256")

torchless = TorchlessCommand()


def test_a_table_of_plans_best_first(tmp_path: Path) -> None:
    result = torchless("plan", *SUMMIT, "--top", "4", "--tokens", "3e11", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "gpt-2.2b on 12 ranks of Summit, 256 samples a step, bf16_master" in lines[0]
    heading = next(n for n, line in enumerate(lines) if line.startswith("layout"))
    rows = lines[heading + 1 : heading + 5]
    seconds = [float(row.split(" s ")[0].split()[-1]) for row in rows]
    assert len(rows) == 4
    assert seconds == sorted(seconds)
    assert lines[-1].startswith("300G tokens with the best plan: ")
    assert "days" in lines[-1]


def test_json_has_every_figure_and_the_whole_plan(tmp_path: Path) -> None:
    result = torchless("plan", *SUMMIT, "--top", "2", "--json", cwd=tmp_path)
    rows = json.loads(result.stdout)
    assert len(rows) == 2
    wanted = {"layout", "schedule", "microbatch", "step_s", "peak_share", "memory_bytes", "bubble"}
    wanted |= {"exposed_s", "staleness", "tokens_per_day", "fits", "plan"}
    for row in rows:
        assert wanted <= set(row)
        plan = Plan(**{k: tuple(v) if isinstance(v, list) else v for k, v in row["plan"].items()})
        assert plan.global_batch_size == 256
        assert plan.num_ranks == 12
        assert row["layout"]["pipe"] == plan.pipe
        assert row["fits"]


def test_a_known_configuration_is_priced(tmp_path: Path) -> None:
    """AxoNN's own 12 B run (2110.13005, figure 9): 247.5 s a batch, within 10 %."""
    known = "pipe=6,data=8,order=pipe-data,schedule=axonn,microbatch=8,recompute=full,offload=host"
    words = ("plan", "gpt-12b", "--cluster", "summit", "--gpus", "48", "--batch", "16384")
    result = torchless(*words, "--fix", known, "--json", cwd=tmp_path)
    (row,) = json.loads(result.stdout)
    assert row["plan"]["rank_order"] == ["x", "y", "z", "pipe", "data"]
    assert row["step_s"] == pytest.approx(247.5, rel=0.10)


def test_the_best_plan_is_written_and_explained(tmp_path: Path) -> None:
    written = torchless(
        "plan", *SUMMIT, "--max-staleness", "0", "--write", "plan.json", "--explain", cwd=tmp_path
    )
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.schedule != "two_bw"
    assert "plan written to plan.json" in written.stdout
    for part in ("- A step of", "The runner-up", "one more node", "twice the bandwidth", "8 GiB"):
        assert part in written.stdout
    about = ("--model", "gpt-2.2b", "--cluster", "summit")
    result = torchless("why", "plan.json", *about, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "- A step of data" in result.stdout
    assert "holds most" in result.stdout
    slow = torchless("why", "plan.json", "slow", *about, cwd=tmp_path)
    assert "holds most" not in slow.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["plan", "gpt-12c"], "gpt-12b"),
        (["plan", "gpt-12b", "--cluster", "sumit"], "name a built-in one of ['alps'"),
        (["plan", "gpt-12b", "--cluster", "summit"], "has no cluster.num_nodes"),
        (["plan", "gpt-12b", "--cluster", "summit", "--gpus", "-4"], "--gpus -4"),
        (["plan", *SUMMIT, "--batch", "0"], "--batch 0"),
        (["plan", *SUMMIT, "--fix", "pip=2"], "did you mean 'pipe'"),
        (["plan", *SUMMIT, "--method", "best"], "--method 'best' is not one of"),
        (["plan", *SUMMIT, "--parallel.pipe", "2"], "write --fix pipe=VALUE"),
        (["plan", "gpt-12b", "--gpus", "2"], "the smallest needs about"),
        (["why", "nothing.json"], "nothing.json cannot be read"),
        (["why", ".", "fast"], "'fast' is not a question"),
        (["why", "."], "holds no run"),
        (["train", "--plan", "auto"], "--plan auto needs the number of processes: add --nproc N"),
        (["train", "--plan", "auto", "--nproc", "2", "--parallel.x", "2"], "contradict each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_one_clear_line(words: list[str], text: str, tmp_path: Path) -> None:
    result = torchless(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_library_returns_the_same_records(tmp_path: Path) -> None:
    found = ganglion.plan("gpt-2.2b", cluster="summit", gpus=12, batch=256, top=2)
    result = torchless("plan", *SUMMIT, "--top", "2", "--json", cwd=tmp_path)
    assert [row.step_s for row in found.plans] == [r["step_s"] for r in json.loads(result.stdout)]
    assert found.best.record()["plan"]["pipe"] == found.best.plan.pipe


def test_a_run_is_planned_again_from_what_it_has_shown(tmp_path: Path) -> None:
    """One process; the steps that it took decide how fast the machine is."""
    (tmp_path / "run.toml").write_text(RUN)
    trained = answer("train", "run.toml", "--plan", "auto", "--nproc", "1", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "--plan auto: one rank" in trained.stdout
    measured = read_measured(tmp_path / "out")
    assert measured.num_steps == 5
    again = answer("plan", "out", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "- The run took" in again.stdout
    assert "as refined by the run" in again.stdout
    why = answer("why", "out", "slow", cwd=tmp_path)
    assert "times the prediction for laptop" in why.stdout
