"""The parts of the MPI way that need no second rank, and what is said when MPI is not there."""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ganglion.cli.launch import mpi
from ganglion.errors import ConfigError, LaunchError, PeerLost
from ganglion.execute.comm.mpi.blocks import LARGE_BYTES, MAX_KEPT, Blocks
from ganglion.execute.comm.mpi.progress import Activity, Progress
from tests.support.absent import Absent
from tests.support.command import DEADLINE_S, environment


class Countdown:
    """A task that is done after some chances to move on."""

    def __init__(self, chances: int) -> None:
        self.left = chances
        self.threads: set[str] = set()

    def advance(self) -> Activity:
        self.threads.add(threading.current_thread().name)
        self.left = max(0, self.left - 1)
        return Activity.AWAITING if self.left else Activity.IDLE


def test_who_waits_moves_everything_on() -> None:
    progress, tasks = Progress(), [Countdown(5), Countdown(9)]
    for task in tasks:
        progress.add(task)
    assert progress.wait(lambda: tasks[0].left == 0, 10)
    assert tasks[1].left == 4
    progress.remove(tasks[1])
    assert not progress.wait(lambda: tasks[1].left == 0, 0.0)
    assert {*tasks[0].threads, *tasks[1].threads} == {threading.current_thread().name}


def test_the_thread_works_while_nobody_waits_and_sleeps_without_work() -> None:
    progress = Progress()
    for _ in range(2):  # the second time it must be woken
        task = Countdown(20)
        progress.add(task)
        progress.notify()
        end_s = time.monotonic() + 30
        while task.left and time.monotonic() < end_s:
            time.sleep(0.001)
        assert task.left == 0
        assert task.threads == {"mpi progress"}
        while not progress._is_asleep and time.monotonic() < end_s:
            time.sleep(0.001)
        assert progress._is_asleep
        progress.remove(task)
    before = threading.active_count()
    progress.stop()
    assert threading.active_count() == before - 1
    progress.notify()
    assert threading.active_count() == before - 1


def test_a_task_that_is_over_is_forgotten() -> None:
    class Last:
        calls = 0

        def advance(self) -> Activity:
            self.calls += 1
            return Activity.OVER

    progress, task = Progress(), Last()
    progress.add(task)
    assert not progress.wait(lambda: False, 0.01)
    assert task.calls == 1


def test_a_block_comes_back_when_its_last_tensor_is_gone() -> None:
    blocks = Blocks()
    taken = blocks.take(LARGE_BYTES + 5)
    assert (taken.numel(), taken.dtype) == (LARGE_BYTES + 5, torch.uint8)
    place, part = taken.data_ptr(), taken[64:128].view(torch.float32)
    del taken
    gc.collect()
    assert blocks.free == []  # a part of it is still in use
    del part
    assert len(blocks.free) == 1
    again = blocks.take(LARGE_BYTES)
    assert again.data_ptr() == place
    assert blocks.free == []
    assert blocks.take(LARGE_BYTES).data_ptr() != place


def test_few_blocks_are_kept_and_small_ones_never() -> None:
    blocks = Blocks()
    taken = [blocks.take(LARGE_BYTES) for _ in range(MAX_KEPT + 3)]
    small = blocks.take(LARGE_BYTES - 1)
    del taken, small
    assert len(blocks.free) == MAX_KEPT
    assert blocks.take(100 * LARGE_BYTES).numel() == 100 * LARGE_BYTES  # none of them fits


def executable(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "mpiexec"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_mpiexec_beside_python_comes_before_the_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    beside, other = executable(tmp_path / "bin"), executable(tmp_path / "other")
    path = str(other.parent)
    assert mpi.find_mpiexec(tmp_path / "bin/python", path) == str(beside)
    assert mpi.find_mpiexec(tmp_path / "elsewhere/python", path) == str(other)
    with pytest.raises(LaunchError, match=r"pip install 'ganglion\[mpi\]'"):
        mpi.find_mpiexec(tmp_path / "elsewhere/python", str(tmp_path))


def test_without_mpi4py_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    beside = executable(tmp_path / "bin")
    with pytest.raises(LaunchError) as caught:
        mpi.find_mpiexec(beside, "")
    assert str(caught.value) == (
        "--transport mpi needs mpi4py and an mpiexec: install both with pip install 'ganglion[mpi]'"
    )


def test_everything_else_works_without_mpi4py() -> None:
    with Absent("mpi4py"):
        import ganglion.cli.launch.mpi
        import ganglion.cli.launch.rank_main  # noqa: F401
        from ganglion.decide.topology import Mesh
        from ganglion.errors import LaunchError
        from ganglion.execute.comm.mpi.world import open_mpi_world

        with pytest.raises(LaunchError) as caught:
            open_mpi_world(Mesh(data=2))
    assert str(caught.value).startswith("MPI cannot be loaded (")
    assert "pip install 'ganglion[mpi]'" in str(caught.value)


OBITUARY = f"""{"=" * 83}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT somewhere
=   EXIT CODE: 9
{"=" * 83}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""


def test_the_words_of_mpiexec_become_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["step 1/8\n", *OBITUARY.splitlines(keepends=True)]
    mpi.show_progress(lines, tmp_path / "mpiexec.stdout")
    assert capsys.readouterr().out == "step 1/8\n"
    mpi.show_failure(tmp_path, 9)
    assert capsys.readouterr().err.splitlines() == [
        "",
        "error: a rank died and mpiexec ended the others, code 9 (process 4711 on somewhere, "
        "Killed (signal 9))",
        f"logs of all ranks: {tmp_path}",
    ]


def test_the_cause_is_shown_and_not_its_consequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [PeerLost("rank 2 is gone"), PeerLost("rank 2 is gone"), ValueError("bad number")]
    for rank, error in enumerate(errors):
        text = mpi.failure_text(rank, error)
        (tmp_path / f"rank{rank}.error.txt").write_text(text)
        os.utime(tmp_path / f"rank{rank}.error.txt", (rank, rank))
    mpi.show_failure(tmp_path, 1)
    shown = capsys.readouterr().err
    assert "error: rank 2 failed: ValueError: bad number" in shown
    assert "PeerLost" not in shown


def test_an_error_of_ours_needs_no_stack() -> None:
    assert mpi.failure_text(3, ConfigError("x = 1: use 2")) == (
        "error: rank 3 failed: ConfigError: x = 1: use 2\n"
    )
    assert "Traceback" not in mpi.failure_text(3, ConfigError("x"))


def test_a_signal_before_the_start_starts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "require_mpiexec", lambda: "/nowhere/mpiexec")
    assert mpi.run_under_mpiexec(tmp_path, 2, False, "warning", [2]) == 130


@pytest.mark.parametrize(("host", "code"), [(socket.gethostname(), 1), ("another", 0)])
def test_a_rank_whose_launcher_is_gone_ends(host: str, code: int) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    script = f"from ganglion.cli.launch.mpi import *; end_with_launcher({gone.pid}, {host!r})"
    result = subprocess.run([sys.executable, "-c", script], env=environment(), timeout=DEADLINE_S)
    assert result.returncode == code
