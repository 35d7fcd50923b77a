"""`generate` and `doctor`, run as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import TINY, environment, ganglion


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model trained for a moment on a small text."""
    cwd = tmp_path_factory.mktemp("text")
    (cwd / "corpus.txt").write_text("the cat sat on the mat. " * 200)
    options = ["--data.kind", "text", "--data.source", "corpus.txt", "--train.steps", "30"]
    env = environment(XDG_CACHE_HOME=str(cwd / "cache"))
    result = ganglion(
        "train", *TINY, *options, "--output.dir", "run", "--output.sample_prompt", "the ",
        cwd=cwd, env=env,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "sample of generated text:\nthe " in result.stdout
    assert (cwd / "cache" / "ganglion").is_dir()
    return cwd


def test_generate_is_repeatable(text_run: Path) -> None:
    arguments = ["generate", "run", "--prompt", "the cat", "--tokens", "20"]
    first, second = (ganglion(*arguments, cwd=text_run) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.startswith("the cat")
    assert len(first.stdout.rstrip("\n")) >= len("the cat") + 10
    other = ganglion(*arguments, "--seed", "1", cwd=text_run)
    assert other.stdout != first.stdout


def test_generate_refuses_an_empty_prompt(text_run: Path) -> None:
    result = ganglion("generate", "run", "--prompt", "", cwd=text_run)
    assert result.returncode == 2
    assert "--prompt is empty" in result.stderr


def test_generate_refuses_a_model_without_text(tmp_path: Path) -> None:
    options = ["--train.steps", "1", "--output.dir", "run"]
    assert ganglion("train", *TINY, *options, cwd=tmp_path).returncode == 0
    result = ganglion("generate", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert "holds no text model" in result.stderr


def test_doctor_runs_a_real_all_reduce(tmp_path: Path) -> None:
    result = ganglion("doctor", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for part in ("torch", "cores", "memory", "gloo yes", "hf", "mpi", "plot", "wandb"):
        assert part in result.stdout
    assert "sums over two ranks: correct; transport auto chose shm" in result.stdout
    assert "message of 1 MB" in result.stdout
