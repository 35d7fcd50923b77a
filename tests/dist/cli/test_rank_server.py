"""Local ranks as forks of a server: requests to stop that come early or late are not lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.command import DEADLINE_S, end_with_children, environment
from tests.support.warm_process import WarmProcess

# A launcher whose ranks run `main` of the module `mine`, in the folder of a test.
LAUNCH = """
import sys
from pathlib import Path
from ganglion.cli.launch.signals import forwarded_signals
from ganglion.cli.launch.rank_server import rank_processes, start_rank_server

if __name__ == "__main__":
    start_rank_server("mine")
    with forwarded_signals("stopping", rank_processes) as received:
        from ganglion.cli.launch.launcher import run_processes
        Path("run/logs").mkdir(parents=True)
        sys.exit(run_processes(Path("run"), 2, False, "warning", received, module="mine"))
"""


def launch(body: str, cwd: Path) -> WarmProcess:
    (cwd / "mine.py").write_text(f"import os, signal, sys, time\nfrom pathlib import Path\n{body}")
    (cwd / "launch.py").write_text(LAUNCH)
    return WarmProcess([str(cwd / "launch.py")], cwd, environment())


def finish(process: WarmProcess) -> tuple[int, str]:
    """Return the exit code and the errors that were printed."""
    try:
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        end_with_children(process)
    return process.wait(), errors


def wait_for(path: Path, process: WarmProcess) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


# Rank 0 has finished, and waits for rank 1 when the signals come.
FINISHED = """
def main(*arguments):
    Path(f"rank{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    while os.environ["RANK"] == "1" and not Path("signalled").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_rank_that_has_finished_does_not_hang(number: int, tmp_path: Path) -> None:
    process = launch(FINISHED, tmp_path)
    wait_for(tmp_path / "rank0.pid", process)
    time.sleep(0.3)  # for it to have gone on from its last line
    os.kill(int((tmp_path / "rank0.pid").read_text()), number)
    (tmp_path / "signalled").touch()
    code, errors = finish(process)
    assert code == 0, errors


# A signal that comes before the handler is in place must be seen by the handler.
EARLY = """
from ganglion.cli.launch.signals import StopSignal

def main(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    with StopSignal(end_on_second=False) as stop:
        Path(f"code{os.environ['RANK']}").write_text(str(stop.exit_code))
"""


def test_a_signal_before_the_handler_waits_for_it(tmp_path: Path) -> None:
    code, errors = finish(launch(EARLY, tmp_path))
    assert code == 0, errors
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(2)] == ["143", "143"]


LEAVES = """
from ganglion.cli.launch.rank_server import accept_signals

def main(*arguments):
    accept_signals()
    if os.environ["RANK"] == "1":
        sys.exit(0)
    time.sleep(60)
"""


def test_a_rank_that_calls_exit_is_a_failure(tmp_path: Path) -> None:
    code, errors = finish(launch(LEAVES, tmp_path))
    assert code == 1
    assert "rank 1 failed: LaunchError: the rank called sys.exit(0)" in errors


LOST = """
from ganglion.errors import PeerLost

def main(*arguments):
    if os.environ["RANK"] == "0":
        raise PeerLost("rank 1 is gone")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_cause_is_shown_and_not_what_follows_from_it(tmp_path: Path) -> None:
    code, errors = finish(launch(LOST, tmp_path))
    assert code == 1
    assert "rank 1 failed: Signal 9 (SIGKILL)" in errors
