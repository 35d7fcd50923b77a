"""Trouble on purpose: failing, killed and interrupted ranks, bad data and broken checkpoints."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.command import (
    DEADLINE_S,
    TINY,
    alive,
    end_with_children,
    ganglion,
    metrics_of,
    start_cold,
    start_ganglion,
)
from tests.support.warm_process import WarmProcess

TWO = ["train", *TINY, "--nproc", "2", "--output.dir", "run"]
LONG = [*TWO, "--train.steps", "100000"]


def wait_for_steps(process: WarmProcess, folder: Path, steps: int) -> list[int]:
    """Wait until some steps are done; return the ids of its ranks."""
    end_s = time.monotonic() + DEADLINE_S
    path = folder / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < steps:
        assert time.monotonic() < end_s, "no step was finished in time"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    server = psutil.Process(process.pid).children()
    return [rank.pid for each in server for rank in each.children()]


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> list[int]:
    end_s = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end_s:
        time.sleep(0.05)
    return alive(pids)


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[tuple[WarmProcess, Path, list[int]]]:
    """A run of two processes that is under way; whatever is left of it is ended afterwards."""
    process = start_ganglion(*LONG, cwd=tmp_path)
    workers = wait_for_steps(process, tmp_path / "run", 3)
    yield process, tmp_path, workers
    end_with_children(process)
    for pid in alive(workers):
        psutil.Process(pid).kill()


LongRun = tuple[WarmProcess, Path, list[int]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_stops_cleanly(long_run: LongRun, number: int, code: int) -> None:
    process, cwd, workers = long_run
    process.send_signal(number)
    screen, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, errors
    assert "stopping after this step, with a checkpoint" in errors
    assert "Traceback" not in errors
    assert "continue with: ganglion train --resume" in screen
    assert wait_until_gone(workers) == []
    done = len(metrics_of(cwd / "run"))
    steps = ["--train.steps", str(done + 2)]
    resumed = ganglion("train", "--resume", "--nproc", "2", "--output.dir", "run", *steps, cwd=cwd)
    assert resumed.returncode == 0, resumed.stderr
    assert [r["step"] for r in metrics_of(cwd / "run")] == list(range(1, done + 3))


def test_a_signal_to_every_process_still_saves(long_run: LongRun) -> None:
    """As a service manager sends it: to the parent and to each worker."""
    process, cwd, workers = long_run
    for pid in [process.pid, *workers]:
        psutil.Process(pid).terminate()
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert wait_until_gone(workers) == []
    done = len(metrics_of(cwd / "run"))
    names = [path.name for path in (cwd / "run" / "checkpoints").iterdir()]
    assert names == [f"step-{done:08d}"]


def test_the_second_ctrl_c_stops_at_once(long_run: LongRun) -> None:
    process, _, workers = long_run
    for pid in workers:  # frozen ranks never finish their step
        psutil.Process(pid).suspend()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert wait_until_gone(workers) == []


def test_a_ctrl_c_before_the_first_worker_is_not_lost(tmp_path: Path) -> None:
    process = start_cold("-m", "ganglion", *LONG, cwd=tmp_path)
    while not (tmp_path / "run" / "plan.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(0.3)  # torch is being imported, and no worker exists yet
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_ctrl_c_with_one_process(tmp_path: Path) -> None:
    process = start_ganglion("train", *TINY, *LONG[len(TWO) - 2 :], cwd=tmp_path)
    try:
        wait_for_steps(process, tmp_path / "run", 3)
        process.send_signal(signal.SIGINT)
        screen, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        end_with_children(process)
    assert process.returncode == 130, errors
    assert "checkpoint: run/checkpoints/step-" in screen


def test_workers_do_not_outlive_a_killed_parent(long_run: LongRun) -> None:
    process, _, workers = long_run
    process.kill()
    assert len(workers) == 2
    assert wait_until_gone(workers) == []


def test_a_killed_rank_is_named(long_run: LongRun) -> None:
    process, _, workers = long_run
    psutil.Process(workers[1]).kill()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "rank 1 failed: Signal 9 (SIGKILL)" in errors
    assert wait_until_gone(workers) == []


def test_a_failing_rank_shows_one_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from torch import nn\n"
        "class Bad(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if os.environ['RANK'] == '1' and self.training:\n"
        "            raise ValueError('broken on purpose')\n"
        "        return super().forward(x.flatten(1))\n"
        "def build(width):\n"
        "    return [Bad(width, 10)]\n"
    )
    options = ["--model.build", "mine:build", "--model.args.width", "784", "--data.kind", "images"]
    result = ganglion(*TWO, *options, "--train.steps", "3", cwd=tmp_path)
    assert result.returncode == 1
    assert "error: rank 1 failed: ValueError: broken on purpose" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert "mine.py" in result.stderr
    assert result.stdout.count("Traceback") == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--data.kind", "text", "--data.source", "nowhere"], "nowhere"),
        (["--data.kind", "text", "--data.source", "empty"], "data.source"),
        (["--data.kind", "text", "--data.source", "short.txt"], "data.seq_len"),
        (["--data.kind", "images", "--data.source", "empty"], "data.source"),
        (["--model.build", "nothing:build"], "model.build"),
    ],
    ids=["missing", "empty", "short", "no-images", "no-module"],
)
def test_bad_input_is_one_clear_line(options: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("abc")
    arguments = ["train", *TINY, "--train.steps", "2", "--output.dir", "run"]
    result = ganglion(*arguments, *options, cwd=tmp_path)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_input_in_two_processes_is_told_once_and_can_be_corrected(tmp_path: Path) -> None:
    options = ["--data.kind", "text", "--data.source", "nowhere", "--train.steps", "2"]
    result = ganglion(*TWO, *options, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("nowhere") == 1
    assert "Traceback" not in result.stderr
    corrected = [*options[:2], "--data.source", "good.txt", "--train.steps", "1"]
    (tmp_path / "good.txt").write_text("a b c d " * 100)
    again = ganglion(*TWO, *corrected, cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_a_corrupt_checkpoint_is_refused(tmp_path: Path) -> None:
    first = ganglion(*TWO, "--train.steps", "4", "--checkpoint.every", "2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    shard = sorted((newest / "shards").iterdir())[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0xFF
    shard.write_bytes(content)
    again = ["train", "--resume", "--nproc", "2", "--output.dir", "run", "--train.steps", "6"]
    result = ganglion(*again, cwd=tmp_path)
    assert result.returncode == 1
    assert shard.name in result.stderr
    assert "step-00000002" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_refused_resume_spoils_nothing(tmp_path: Path) -> None:
    """Wrong settings, a finished run and an unfinished checkpoint; then the right thing works."""
    one = ["train", *TINY, "--output.dir", "run", "--train.steps", "2"]
    assert ganglion(*one, cwd=tmp_path).returncode == 0
    unfinished = tmp_path / "run" / "checkpoints" / "step-00000099.incomplete"
    unfinished.mkdir()
    again = ["train", "--resume", "--output.dir", "run"]
    wider = ganglion(*again, "--model.hidden", "32", "--train.steps", "3", cwd=tmp_path)
    assert wider.returncode == 2
    assert "Traceback" not in wider.stderr
    finished = ganglion(*again, cwd=tmp_path)
    assert finished.returncode == 2
    assert "the run is at step 2 already" in finished.stderr
    longer = ganglion(*again, "--train.steps", "3", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert "WARNING" not in longer.stdout + longer.stderr
    assert not unfinished.exists()
