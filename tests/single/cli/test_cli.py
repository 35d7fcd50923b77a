"""Commands that answer without starting anything: help, versions, configuration, refusals."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import ganglion as package
from tests.support.answers import TorchlessCommand, ganglion
from tests.support.command import TINY
from tests.support.command import ganglion as started

torchless = TorchlessCommand()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["generate", "--help"], 0),
        (["--version"], 0),
        (["train", "--print-config"], 0),
        (["schedule", "2bw", "--batches", "2", "--compare", "1f1b,gpipe"], 0),
        (["schedule", "2bw", "--microbatches", "2"], 2),
        (["train", "--parallel.x", "3"], 2),
        (["train", "--train.stpes", "2"], 2),
        ([], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_answers_without_torch(arguments: list[str], code: int, tmp_path: Path) -> None:
    result = torchless(*arguments, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_schedule_prints_json(tmp_path: Path) -> None:
    arguments = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--json"]
    figures = json.loads(ganglion(*arguments, cwd=tmp_path).stdout)
    assert figures["makespan_s"] == 9 and figures["bubble"] == pytest.approx(1 / 3)
    assert figures["peak_live"] == [2, 1]
    assert (figures["versions"], figures["staleness"]) == (1, 0)
    assert figures["order"] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def test_version_of_the_module_as_it_is_started(tmp_path: Path) -> None:
    assert started("--version", cwd=tmp_path).stdout == f"ganglion {package.__version__}\n"


def test_printed_config_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[train]\nsteps = 7\n")
    printed = ganglion("train", "my.toml", "--train.seed=5", "--print-config", cwd=tmp_path).stdout
    tables = tomllib.loads(printed)
    assert (tables["train"]["steps"], tables["train"]["seed"]) == (7, 5)
    (tmp_path / "again.toml").write_text(printed)
    assert ganglion("train", "again.toml", "--print-config", cwd=tmp_path).stdout == printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "no.toml"], "error: run file no.toml does not exist"),
        (["train", "--train.stpes", "3"], "did you mean 'train.steps'"),
        (["train", "--train.steps"], "--train.steps needs a value"),
        (["train", "--nproc", "3"], "train.global_batch_size = 16 is not a multiple of"),
        (["train", "--nproc", "0"], "Invalid value for '--nproc'"),
        (["train", "--parallel.x", "3"], "model.heads = 4 cannot be split over parallel.x = 3"),
        (["train", "--parallel.z", "3"], "data * z = 4 * 3 = 12: set train.global_batch_size = 24"),
        (["train", "--parallel.pipe", "11"], "parallel.pipe = 11 makes 11 stages, but the model"),
        (["train", "--averaging.method", "easgd"], "averaging.method = 'easgd' cannot be used"),
        (
            ["train", "--averaging.servers", "1"],
            "averaging.servers = 1, but averaging.method = 'none' needs none",
        ),
        (
            ["verify", "--nproc", "2", "--averaging.method", "sync_easgd"],
            'averaging.method = "sync_easgd" trains 2 models, which no training on one process is',
        ),
        (["train", "--plan", "no.json"], "--plan no.json cannot be read"),
        (
            ["train", "--plan", "no.json", "--parallel.transport", "torch"],
            "--plan no.json cannot be read",
        ),
        (
            ["train", "--parallel.keep_gathered", "true", "--parallel.keep_gathered_mib", "2.5"],
            "parallel.keep_gathered_mib = 2.5 only some: leave one out",
        ),
        (["train", "--plan", "p.json", "--parallel.x", "1"], "--plan and --parallel.x contradict"),
        (
            ["train", "--plan", "p.json", "--parallel.keep_gathered", "true"],
            "--plan and --parallel.keep_gathered contradict",
        ),
        (
            ["train", "--plan", "p.json", "--train.precision", "bf16"],
            "--train.precision contradict",
        ),
        (
            ["train", "--parallel.schedule", "2bw", "--parallel.pipe", "8"],
            "two_bw needs at least stages + extra = 8 + 0 = 8 microbatches a batch, not 4",
        ),
        (["train", "--data.source", "nowhere"], "nowhere"),
        (["train", "--resume"], "--resume found no run with a checkpoint below runs/"),
        (["train", "--resume", "--output.dir", "x"], "holds no run; leave out --resume"),
        (["train", "--output.dir", "taken"], "already holds a run: add --resume"),
        (["train", "--output.dir", "file/sub"], "cannot be written"),
        (["generate", "nowhere"], "nowhere holds no run"),
        (["doctor", "--train.steps", "3"], "`plan` and `why` take those"),
        (["--log-level", "loud", "doctor"], "'loud' is not one of"),
        (["trian"], "No such command 'trian'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_clear_line(arguments: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("{}")
    (tmp_path / "file").write_text("")
    result = ganglion(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_one_process_trains_here(tmp_path: Path) -> None:
    result = ganglion("train", *TINY, "--train.steps", "3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 process (data=1)" in result.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("quickstart-")
    assert f"run folder: runs/{folder.name}" in result.stdout


def test_an_error_of_an_earlier_launch_is_not_told_again(tmp_path: Path) -> None:
    from ganglion.cli.launch.launcher import RankLogs

    (tmp_path / "rank1.error.json").write_text("an error of yesterday")
    environments: dict[int, dict[str, str]] = {0: {}, 1: {}}
    RankLogs(tmp_path, []).reify(environments)
    assert list(tmp_path.iterdir()) == []
    assert environments[1]["TORCHELASTIC_ERROR_FILE"] == str(tmp_path / "rank1.error.json")
