"""`ganglion verify`: layouts that equal one process pass, one that does not is found out."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from ganglion import Plan
from ganglion.cli.verify import serial_plan
from ganglion.errors import ConfigError
from ganglion.execute.checkpoint.differences import TrainingNumbers, compare, formula
from tests.support.command import TINY, environment, python

DEADLINE_S = 200  # two trainings, each with processes of its own
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)
ROW = re.compile(r"^(\S.*?) +(\d\.\d+e[+-]\d+|inf|nan) +(\d\.\d+e[+-]\d+|inf|nan)(  DIFFERENT)?$")
NAMES = ["loss", "gradient norm", "embedding.tokens.weight", "head.norm.weight"]
OWN_MODEL = """
import os
from torch import nn


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + {factor} * int(os.environ["RANK"]))


def build():
    return {{"first": nn.Linear(8, 8), "mine": Scaled(8, 10), "last": nn.Linear(10, 10)}}


class Numbers:
    num_classes = 10

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return [float(index * k % 13) for k in range(8)], index % 10


def numbers():
    return Numbers()
"""


def verify(*arguments: str, cwd: Path) -> CompletedProcess[str]:
    """Verify, with a temporary folder of its own to look into."""
    (cwd / "tmp").mkdir(exist_ok=True)
    env = environment(TMPDIR=str(cwd / "tmp"), XDG_CACHE_HOME=str(cwd / "cache"))
    return python("-m", "ganglion", "verify", *arguments, cwd=cwd, env=env, deadline_s=DEADLINE_S)


def left_behind(cwd: Path) -> list[Path]:
    return list((cwd / "tmp").glob("ganglion-verify-*"))


def rows(output: str) -> dict[str, tuple[float, float]]:
    matches = (ROW.match(line) for line in output.splitlines())
    return {m[1]: (float(m[2]), float(m[3])) for m in matches if m is not None}


def assert_equal(result: CompletedProcess[str], cwd: Path) -> dict[str, tuple[float, float]]:
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(result.stdout)
    assert all(share < 1e-3 for _, share in found.values()), result.stdout
    assert f"equal: all {len(found)} are within 1e-06 * (|value| + 0.01)" in result.stdout
    assert not left_behind(cwd)
    assert not (cwd / "runs").exists()
    return found


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            [
                *("--parallel.pipe", "2", "--parallel.schedule", "2bw"),
                *("--memory.recompute", "full", "--memory.compute_fp32", "true"),
                *("--train.precision", "bf16_master"),
            ],
            "on 2 processes (pipe=2)",
        ),
        (
            ["--parallel.x", "2", "--parallel.z", "2", "--train.precision", "bf16"],
            "on 4 processes (x=2 x z=2)",
        ),
    ],
    ids=["two_bw", "x and z"],
)
def test_layouts_equal_one_process(options: list[str], text: str, tmp_path: Path) -> None:
    result = verify(*TINY, *options, cwd=tmp_path)
    found = assert_equal(result, tmp_path)
    assert set(NAMES) <= set(found)
    assert f"3 steps in fp64 {text}" in result.stdout
    assert "3 steps in fp64 on 1 process\n" in result.stdout
    assert any(largest > 0 for largest, _ in found.values())  # sums were taken in another order


def test_dropout_is_the_same_on_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra `hf`")
    sizes = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    settings = {"model_type": "gpt2", **sizes, "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    args = [word for key, value in settings.items() for word in (f"--model.args.{key}", str(value))]
    model = ["--model.build", "ganglion.execute.models.hugging_face:build", *args]
    result = verify(*TINY, *model, "--nproc", "2", "--steps", "2", cwd=tmp_path)
    assert_equal(result, tmp_path)
    assert "2 steps in fp64 on 2 processes (data=2)" in result.stdout


def test_a_rank_that_computes_something_else_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_MODEL.format(factor=0.01))
    (tmp_path / "run.toml").write_text(
        '[model]\nbuild = "mine:build"\n[data]\nkind = "dataset"\nsource = "mine:numbers"\n'
    )
    result = verify("run.toml", "--nproc", "2", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    found = rows(result.stdout)
    assert list(found)[:2] == ["loss", "gradient norm"]
    assert found["mine.weight"][1] > 1 and found["loss"][1] > 1
    assert re.search(r"mine\.weight .*DIFFERENT\n", result.stdout)
    assert re.search(r"DIFFERENT: \d of 8 are not within 1e-06", result.stdout)
    assert not left_behind(tmp_path)


def test_a_layout_that_a_rank_refuses_ends_in_one_line(tmp_path: Path) -> None:
    """Sizes inside a model of one's own are known to the ranks alone."""
    (tmp_path / "mine.py").write_text(OWN_MODEL.format(factor=0.0).replace("10)", "9)", 1))
    (tmp_path / "run.toml").write_text(
        '[model]\nbuild = "mine:build"\n[data]\nkind = "dataset"\nsource = "mine:numbers"\n'
    )
    result = verify("run.toml", "--parallel.x", "2", cwd=tmp_path)
    assert result.returncode == 1
    assert "mine.weight: dim 0 of a parameter of shape (9, 8) has 9 entries" in result.stderr
    assert "Traceback" not in result.stderr
    logs = re.search(r"logs of all ranks: (.*)", result.stderr)
    assert logs is not None and (Path(logs[1]) / "rank0.log").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no.toml"], "error: run file no.toml does not exist"),
        (["--train.stpes", "3"], "did you mean 'train.steps'"),
        ([], "the layout is one process, so there is nothing to compare it with: add --nproc 2"),
        (["--nproc", "3"], "train.global_batch_size = 8 is not a multiple of"),
        (["--parallel.x", "3"], "model.heads = 2 cannot be split over parallel.x = 3"),
        (["--nproc", "2", "--transport", "mpi"], 'parallel.transport = "mpi" cannot be verified'),
        (["--nproc", "2", "--optimizer.name", "muon"], "add --optimizer.name adamw"),
        (
            ["--parallel.pipe", "2", "--parallel.schedule", "stash"],
            "has stages whose gradients are late by [0, 1] updates",
        ),
        (["no.toml", "--plan", "no.json"], "error: run file no.toml does not exist"),
        (["--nproc", "2", "--steps", "0"], "Invalid value for '--steps'"),
        (["--nproc", "2", "--tolerance", "0"], "Invalid value for '--tolerance'"),
        (["--nproc", "2", "--data.kind", "text", "--data.source", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_clear_line(arguments: list[str], text: str, tmp_path: Path) -> None:
    tiny = [] if "no.toml" in arguments else TINY
    result = verify(*tiny, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not left_behind(tmp_path)


def test_it_does_not_run_under_a_launcher(tmp_path: Path) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    env = environment(**launcher, **address)
    result = python("-m", "ganglion", "verify", *TINY, cwd=tmp_path, env=env)
    assert result.returncode == 2
    assert "verify starts its processes itself, but torchrun started this one" in result.stderr


# --- the parts ----------------------------------------------------------------------------------


def test_differences_are_told_in_units_of_the_tolerance() -> None:
    wanted = torch.tensor([1.0, 0.0], dtype=torch.float64)
    inside = compare("w", wanted + torch.tensor([1e-8, 0.99e-10]), wanted, 1e-8)
    assert inside.is_small and inside.of_tolerance == pytest.approx(0.99, rel=1e-3)
    assert inside.largest == pytest.approx(1e-8, rel=1e-6)
    outside = compare("w", wanted + torch.tensor([0, 2e-10], dtype=torch.float64), wanted, 1e-8)
    assert not outside.is_small and outside.of_tolerance == pytest.approx(2)
    assert formula(1e-8) == "1e-08 * (|value| + 0.01)"


def test_what_cannot_be_compared_is_different() -> None:
    wanted = torch.ones(2)
    assert not compare("w", torch.tensor([1.0, math.nan]), wanted, 1.0).is_small
    assert not compare("w", torch.tensor([math.nan, 1.0]), torch.full((2,), math.nan), 1.0).is_small
    assert not compare("w", torch.ones(3), wanted, 1.0).is_small
    assert compare("w", torch.empty(0, 2), torch.empty(0, 2), 1e-8).is_small


def test_numbers_go_through_a_file_unchanged(tmp_path: Path) -> None:
    told = TrainingNumbers([0.1, 1 / 3], [math.pi, math.nan], ["a.weight"])
    told.write(tmp_path)
    again = TrainingNumbers.read(tmp_path)
    assert again.losses == told.losses and again.parameters == told.parameters
    assert again.grad_norms[0] == math.pi and math.isnan(again.grad_norms[1])


def test_the_serial_plan_sees_the_same_microbatches() -> None:
    plan = Plan(data=2, z=2, x=2, microbatch_size=3, num_microbatches=4, recompute="full")
    serial = serial_plan(plan)
    assert (serial.num_ranks, serial.global_batch_size) == (1, plan.global_batch_size)
    assert (serial.microbatch_size, serial.recompute) == (3, "full")
    assert serial.schedule == "one_f_one_b"
    late = dataclasses.replace(plan, pipe=2, schedule="two_bw")
    assert serial_plan(late).schedule == "two_bw"
    with pytest.raises(ConfigError, match=r"late by \[0, 1, 2\] updates"):
        serial_plan(Plan(pipe=3, schedule="stash", num_microbatches=3))
