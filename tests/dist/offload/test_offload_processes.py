"""Offloading in processes of their own: killed, out of disk, and started by the command line."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ganglion.execute.checkpoint import latest_checkpoint
from tests.dist.offload.offload_programs import batches, make_run, train
from tests.support.command import TINY, ganglion, metrics_of, python

pytestmark = pytest.mark.timeout(200)


def test_a_run_killed_in_the_middle_of_a_write_resumes_and_loses_nothing(tmp_path: Path) -> None:
    result = python(
        "-m", "tests.dist.offload.offload_programs", "killed", str(tmp_path), cwd=tmp_path
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not list((tmp_path / "tier").iterdir())  # the tier was scratch
    with make_run(tmp_path / "whole", offload="none") as whole:
        expected = [result.loss for result in whole.steps(batches())]
    with make_run(tmp_path / "again") as resumed:
        assert resumed.load(tmp_path / "saved")
        done = resumed.step
        assert 0 < done < len(expected)
        assert train(resumed, tmp_path / "saved") == expected[done:]


def test_a_limit_on_files_is_told_before_training(tmp_path: Path) -> None:
    arguments = ("-m", "tests.dist.offload.offload_programs", "full at once", str(tmp_path))
    result = python(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "refused: no room for optimizer state in memory.offload_dir" in result.stdout
    assert "MiB more were needed beside" in result.stdout and "larger disk" in result.stdout


OFFLOADED = ["--memory.offload", "disk", "--memory.bucket_size", "2048"]


@pytest.mark.parametrize("layout", [["--nproc", "2"], ["--nproc", "2", "--parallel.pipe", "2"]])
def test_the_command_line_trains_and_resumes_offloaded(layout: list[str], tmp_path: Path) -> None:
    words = ["train", *TINY, *layout, "--train.precision", "bf16_master", "--checkpoint.every", "3"]
    steps = ["--train.steps", "6"]
    whole = ganglion(*words, *steps, "--output.dir", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    stopped = ["--train.stop_at", "3", "--output.dir", "moved"]
    for more in ([*stopped], ["--resume", "--train.stop_at", "0", "--output.dir", "moved"]):
        result = ganglion(*words, *steps, *OFFLOADED, *more, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    expected = [record["loss"] for record in metrics_of(tmp_path / "whole")]
    assert [record["loss"] for record in metrics_of(tmp_path / "moved")] == expected
    log = (tmp_path / "moved" / "logs" / "rank1.log").read_text()
    assert "optimizer state on disk" in log and "moved in buckets of" in log
    assert '"kind": "write"' in (tmp_path / "moved" / "trace" / "rank0.jsonl").read_text()
    assert latest_checkpoint(tmp_path / "moved" / "checkpoints") is not None
