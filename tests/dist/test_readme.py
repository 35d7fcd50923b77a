"""What the README tells a newcomer to type is typed here, made short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import TINY, environment, python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = " ".join([*TINY, "--train.steps", "2"])


def commands() -> list[str]:
    """Return the lines of the README's shell blocks, comments removed."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = (line.split("#")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def run_shell(command: str, cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(PATH=path),
        timeout=900,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def run_warm(command: str, cwd: Path) -> str:
    """Do what the shell does with `ganglion` or `python` and their words, in a warm process."""
    command, _, target = command.partition(" > ")
    program, *words = shlex.split(command)
    words = [found for word in words for found in _expanded(word, cwd)]
    before = ["-m", "ganglion"] if program == "ganglion" else []
    result = python(*before, *words, cwd=cwd)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    if target:
        (cwd / target).write_text(result.stdout)
    return result.stdout


def _expanded(word: str, cwd: Path) -> list[str]:
    """Return the paths that a pattern stands for, as a shell does."""
    found = sorted(cwd.glob(word)) if "*" in word else []
    return [str(path.relative_to(cwd)) for path in found] or [word]


def test_the_commands_are_the_ones_tested_here() -> None:
    assert commands() == [
        "make train",
        "make test",
        ". .venv/bin/activate",
        "ganglion train --print-config > run.toml",
        "ganglion train run.toml --nproc 2 --train.steps 50",
        "ganglion generate runs/run-*",
        "ganglion doctor",
        "ganglion schedule 2bw --batches 3 --compare 1f1b",
        "ganglion plan run.toml --cluster summit --gpus 6",
        "ganglion simulate run.toml --cluster summit",
        "ganglion memory run.toml",
        "ganglion trace runs/run-*",
        "python examples/own_loop.py",
    ]


@pytest.mark.timeout(900)
def test_make_train(tmp_path: Path) -> None:
    """`make test` cannot be run from within itself; it is what runs this."""
    options = f"{SHORT} --output.dir {shlex.quote(str(tmp_path / 'run'))}"
    screen = run_shell(f"make train ARGS={shlex.quote(options)}", ROOT)
    assert "2 processes (data=2)" in screen
    assert "run folder:" in screen


def test_the_other_commands(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = "--data.kind text --data.source run.toml --output.sample_tokens 5"
    for command in commands()[3:]:
        if "--train.steps" in command:
            command = f"{command} {SHORT} {text}"
        screen = run_warm(command, tmp_path)
    assert "done at step 200" in screen


def test_links_and_picture_exist() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_readme_fits_a_screen_or_two() -> None:
    assert len(README.splitlines()) < 60
