"""Taking `--section.key value` off an argument list."""

from __future__ import annotations

import pytest

from ganglion.cli.overrides import check_taken, split_overrides
from ganglion.errors import ConfigError


def test_overrides_are_taken_out_in_order() -> None:
    rest, overrides = split_overrides(
        ["train", "--train.steps", "3", "run.toml", "--resume", "--output.dir=a=b", "--nproc", "2"]
    )
    assert rest == ["train", "run.toml", "--resume", "--nproc", "2"]
    assert overrides == (("train.steps", "3"), ("output.dir", "a=b"))


def test_values_may_look_like_options() -> None:
    assert split_overrides(["--optimizer.lr", "-1"])[1] == (("optimizer.lr", "-1"),)
    assert split_overrides(["--output.dir", "--x"])[1] == (("output.dir", "--x"),)
    assert split_overrides(["--output.dir="])[1] == (("output.dir", ""),)


def test_paths_are_not_overrides() -> None:
    assert split_overrides(["./a.b", "x.toml", "--plan=p.json"])[0] == [
        "./a.b",
        "x.toml",
        "--plan=p.json",
    ]


def test_missing_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--train.steps needs a value"):
        split_overrides(["--train.steps"])


@pytest.mark.parametrize("command", ["train", "verify", "simulate", "memory"])
def test_commands_with_a_run_file_take_its_keys(command: str) -> None:
    check_taken((("parallel.pipe", "4"),), command)


@pytest.mark.parametrize("command", ["schedule", "trace", "generate", "doctor", None])
def test_other_commands_refuse_run_file_keys(command: str | None) -> None:
    check_taken((), command)
    with pytest.raises(ConfigError, match=r"--parallel.pipe is a run-file key: only `train`, "):
        check_taken((("parallel.pipe", "4"),), command)
