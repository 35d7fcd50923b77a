"""The MPI way between ranks, under a real mpiexec: results, failures, and nobody left behind.

mpiexec starts warm interpreters, except in one training, which starts as a user's does.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ganglion.decide.topology import Mesh
from ganglion.execute.comm import run_threads
from tests.dist.comm.test_comm_gloo import every_collective
from tests.support.command import TINY, alive, environment, metrics_of
from tests.support.warm_process import WarmProcess
from tests.support.warm_python import SERVERS, warm_python

pytest.importorskip("mpi4py", reason="needs pip install 'ganglion[mpi]'")
from ganglion.cli.launch.mpi import require_mpiexec

DEADLINE_S = 90
PEACEFUL = (
    *("exact", "in_place", "interleaved", "by_itself", "disagreeing", "stalled"),
    *("messages", "strided", "troubled_mail", "again_and_again", "torch_too"),
)
# What `ganglion train --transport mpi` does: NUM_RANKS, then keys of the run file.
TRAIN = """
import sys
from ganglion.cli.folder import prepare_folder
from ganglion.cli.launch.signals import forwarded_signals
from ganglion.cli.launch.mpi import run_under_mpiexec
from ganglion.cli.overrides import split_overrides
from ganglion.decide.config import Override, load_run_file, resolve
from ganglion.decide.config.files import QUICKSTART, recipe

keys = [Override(*pair) for pair in split_overrides(["train", *sys.argv[2:]])[1]]
file = load_run_file(recipe(QUICKSTART), keys, QUICKSTART)
plan = resolve(file, int(sys.argv[1]))
folder = prepare_folder(file, plan, "run", resume=False)
with forwarded_signals() as received:
    sys.exit(run_under_mpiexec(folder, plan.num_ranks, False, "warning", received))
"""
# By number of ranks; the last body may end them all.
BODIES = {
    2: (*PEACEFUL, "meshes", "trained_over_gloo", "dying"),
    3: (*PEACEFUL, "dying"),
}
OBITUARY = "=" * 40  # what mpiexec says after a death begins so
RUN = ["-c", TRAIN, "2", *TINY, "--output.dir", "run"]
LONG = [*RUN, "--train.steps", "100000"]
FOUR_STEPS = ["--train.steps", "4"]
AnyProcess = subprocess.Popen[str] | WarmProcess
LongRun = tuple[WarmProcess, list[psutil.Process]]


def finish(process: AnyProcess, folder: Path) -> tuple[int, str]:
    """Wait for a process; past the deadline, show the stacks of its ranks and end them all."""
    try:
        _, errors = process.communicate(timeout=DEADLINE_S)
        return process.returncode, errors or ""
    except subprocess.TimeoutExpired:
        ranks = [path.name.removeprefix("stack") for path in folder.glob("stack*")]
        for pid in alive([int(rank) for rank in ranks]):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"{path.name}:\n{path.read_text()}" for path in folder.glob("stack*")]
        raise AssertionError("\n".join(["the ranks did not end in time", *stacks])) from None
    finally:
        end(process)


def end(process: AnyProcess) -> None:
    """Kill what is left of a process and of all that it started."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.communicate()


def run_bodies(num_ranks: int, folder: Path, *names: str) -> tuple[int, str]:
    """Run bodies under mpiexec; return its code and all that was printed."""
    command = [require_mpiexec(), "-n", str(num_ranks), warm_python()]
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(
            [*command, "-m", "tests.dist.comm.mpi_bodies", str(folder), *names],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        code, _ = finish(process, folder)
    return code, (folder / "printed").read_text()


def start(command: list[str], cwd: Path) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=cwd, env=environment(), **pipes)


@dataclass(frozen=True)
class Outcome:
    """How a run of bodies ended, what it printed, and what the bodies returned on every rank."""

    num_ranks: int
    code: int
    printed: str
    folder: Path

    def of(self, body: str) -> list[Any]:
        files = [self.folder / f"rank{rank}.json" for rank in range(self.num_ranks)]
        assert all(file.exists() for file in files), self.printed
        results = [json.loads(file.read_text()) for file in files]
        assert all(body in each for each in results), self.printed
        return [each[body] for each in results]


def run_all(num_ranks: int, folder: Path, *names: str) -> Outcome:
    return Outcome(num_ranks, *run_bodies(num_ranks, folder, *names), folder)


@functools.cache
def bodies_of(num_ranks: int, folder: Path) -> Outcome:
    """Run all bodies for a number of ranks in one start, up to the death of the ranks."""
    (folder / str(num_ranks)).mkdir()
    return run_all(num_ranks, folder / str(num_ranks), *BODIES[num_ranks])


@pytest.fixture(scope="module")
def folder_of_bodies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("bodies")
    bodies_of.cache_clear()


@pytest.fixture
def two_ranks(folder_of_bodies: Path) -> Outcome:
    return bodies_of(2, folder_of_bodies)


@pytest.fixture(params=[2, 3])
def outcome(request: pytest.FixtureRequest, folder_of_bodies: Path) -> Outcome:
    return bodies_of(request.param, folder_of_bodies)


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[LongRun]:
    """A run that is under way, and its ranks; whatever is left of it is ended afterwards."""
    process = WarmProcess(LONG, tmp_path, environment())
    metrics = tmp_path / "run/metrics.jsonl"
    end_s = time.monotonic() + DEADLINE_S
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s, "no step was finished in time"
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    yield process, [each for each in started if "-IS" in each.cmdline()]
    end(process)
    for each in started:
        if each.is_running():
            each.kill()


def gone(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=20)[1] == []


def test_ctrl_c_stops_with_a_checkpoint(long_run: LongRun, tmp_path: Path) -> None:
    process, ranks = long_run
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    code, errors = finish(process, tmp_path)
    assert code == 130, errors
    assert "stopping after this step, with a checkpoint" in errors
    assert "Traceback" not in errors and "error:" not in errors
    done = len(metrics_of(tmp_path / "run"))
    assert (tmp_path / f"run/checkpoints/step-{done:08d}/state.json").exists()
    assert gone(ranks)


def test_a_second_ctrl_c_stops_at_once(long_run: LongRun, tmp_path: Path) -> None:
    process, ranks = long_run
    for each in psutil.Process(SERVERS[0].pid).children(recursive=True):
        if not each.children():
            each.suspend()  # frozen ranks never finish their step
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process, tmp_path)[0] == 130
    assert gone(ranks)


def test_a_killed_rank_of_a_training_is_told(long_run: LongRun, tmp_path: Path) -> None:
    process, ranks = long_run
    ranks[1].kill()
    code, errors = finish(process, tmp_path)
    assert code == 1
    assert "error: a rank died and mpiexec ended the others, code 9" in errors
    # mpiexec kills the others and may name one of them.
    assert any(f"process {rank.pid} on " in errors for rank in ranks)
    assert gone(ranks)


def test_ranks_do_not_outlive_a_killed_parent(long_run: LongRun) -> None:
    process, ranks = long_run
    process.kill()
    process.communicate()
    assert gone(ranks)


def test_ranks_give_what_threads_give(two_ranks: Outcome) -> None:
    """Four ranks do so in test_all_carriers."""
    expected = [run_threads(mesh, every_collective) for mesh in (Mesh(data=2), Mesh(x=2))]
    for rank, found in enumerate(two_ranks.of("meshes")):
        assert found == [by_rank[rank] for by_rank in expected]


def test_every_bit_is_that_of_the_order_of_rank(outcome: Outcome) -> None:
    """All dtypes and sizes, all collectives."""
    assert outcome.of("exact") == [[]] * outcome.num_ranks


def test_input_and_output_may_share_memory(outcome: Outcome) -> None:
    assert outcome.of("in_place") == [[True, True]] * outcome.num_ranks


def test_groups_do_not_mix(outcome: Outcome) -> None:
    assert outcome.of("interleaved") == [[True] * 12] * outcome.num_ranks


def test_a_started_collective_ends_by_itself(outcome: Outcome) -> None:
    assert outcome.of("by_itself") == [[True, True]] * outcome.num_ranks


def test_ranks_that_disagree_are_told_who_called_what(outcome: Outcome) -> None:
    ranks = list(range(outcome.num_ranks))
    for sizes, large, kinds, boolean, strides, whole, root in outcome.of("disagreeing"):
        for rank in ranks:
            assert f"{rank}: 'all_reduce(sum) of {5 + rank} float32'" in sizes
            assert f"{rank}: 'all_reduce(sum) of {99_000 * (1 + rank)} float32'" in large
        assert "0: 'all_reduce(sum) of 5 float32', 1: 'broadcast(root=0) of 5 float32'" in kinds
        assert f"all_reduce of ranks {ranks} cannot have op 'sum', root 0 and torch.bool" in boolean
        assert "strides (1, 3), on cpu: give it a contiguous one" in strides
        assert "cannot join 2 torch.float32 and 5 torch.float32" in whole
        assert "root 9" in root
        for text in (sizes, large, kinds, boolean, strides, whole, root):
            assert text.startswith("ProtocolError: ")


def test_a_stalled_rank_is_named(outcome: Outcome) -> None:
    last = outcome.num_ranks - 1
    *others, stalled = outcome.of("stalled")
    assert stalled == ["gave_up"] * last
    for first, second in others:
        assert first == second
        assert first.startswith(
            f"PeerLost: all_reduce(sum) of 10 float32 of ranks {list(range(last + 1))} did not "
            f"end within 0.3 s: rank {last} stayed silent"
        )


def test_messages_of_any_shape_and_dtype_arrive_in_order(outcome: Outcome) -> None:
    assert outcome.of("messages") == [[]] * outcome.num_ranks


def test_all_ranks_may_post_much_at_once(outcome: Outcome) -> None:
    assert outcome.of("strided") == [[True] * 2 * (outcome.num_ranks - 1)] * outcome.num_ranks


def test_trouble_with_messages_names_the_rank(outcome: Outcome) -> None:
    first, *others = outcome.of("troubled_mail")
    silent, unknown, garbage, kinds, left, late, closed = first
    peers = "rank 1" if outcome.num_ranks == 2 else "ranks [1, 2]"
    assert silent.startswith(f"PeerLost: rank 0 waited 0.1 s for a gradient: {peers} stayed silent")
    assert unknown.startswith("ProtocolError: rank 0 has no peer 99")
    assert (
        "sent bytes that are not a message header (" in garbage
        and "ProtocolError: rank " in garbage
    )
    assert kinds == str(["last"] * len(others))
    assert left.startswith(f"PeerLost: rank 0 awaited a gradient, but {peers} had closed")
    assert late.startswith("PeerLost: rank 0 sent a message of kind 'more', but rank 1 had closed")
    assert closed.startswith("CommError: rank 0 uses a transport that it has closed")
    assert all(other[0].startswith("PeerLost: ") for other in others)


def test_a_hundred_groups_leave_nothing(outcome: Outcome) -> None:
    for before, after in outcome.of("again_and_again"):
        assert before == after


def test_torch_has_a_world_for_checkpoints(outcome: Outcome) -> None:
    ranks = list(range(outcome.num_ranks))
    assert outcome.of("torch_too") == [["gloo", ranks]] * outcome.num_ranks


def test_a_killed_rank_ends_the_job(outcome: Outcome) -> None:
    before, _, obituary = outcome.printed.partition(OBITUARY)
    assert before.strip() == ""  # nobody had anything to say until then
    assert outcome.code != 0
    assert "signal 9" in obituary
    pids = [int(path.name.removeprefix("stack")) for path in outcome.folder.glob("stack*")]
    assert len(pids) == outcome.num_ranks
    assert alive(pids) == []


def test_an_uncaught_error_ends_the_job(tmp_path: Path) -> None:
    code, errors = run_bodies(2, tmp_path, "raising")
    assert code != 0
    assert "ValueError: something nobody catches" in errors


def test_training_gives_what_gloo_gives(two_ranks: Outcome, tmp_path: Path) -> None:
    command = [sys.executable, *RUN, *FOUR_STEPS]
    code, errors = finish(start(command, tmp_path), tmp_path)
    assert code == 0, errors
    run = tmp_path / "run"
    losses = [record["loss"] for record in metrics_of(run)]
    assert two_ranks.of("trained_over_gloo") == [losses, losses]
    assert "rank 1 of 2, started by mpiexec" in (run / "logs/rank1.log").read_text()
    assert (run / "checkpoints/step-00000004/state.json").exists()


def test_an_error_of_one_rank_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "run/trace/rank1.jsonl").mkdir(parents=True)  # it cannot write its trace
    code, errors = finish(WarmProcess([*RUN, *FOUR_STEPS], tmp_path, environment()), tmp_path)
    assert code == 1
    assert errors.count("error: rank 1 failed: IsADirectoryError: ") == 1
    assert "error: rank 0" not in errors
    assert "logs of all ranks: run/logs" in errors


def test_servers_of_a_centre_are_the_last_processes_of_mpiexec(tmp_path: Path) -> None:
    """Started by the user's own mpiexec, and resumed by one of ours; workers talk over MPI."""
    common = ["--output.dir", "run", "--train.steps"]
    averaging = ["--averaging.method", "async_msgd", "--averaging.tau", "2"]
    averaging += ["--averaging.servers", "1"]
    train = [warm_python(), "-m", "ganglion", "train"]
    ours = [require_mpiexec(), "-n", "3", *train, *TINY, *averaging, *common, "4"]
    code, errors = finish(start(ours, tmp_path), tmp_path)
    assert code == 0, errors
    again = [*train, "--resume", *common, "8", "--transport", "mpi", "--nproc", "3"]
    code, errors = finish(start(again, tmp_path), tmp_path)
    assert code == 0, errors
    records = metrics_of(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert (records[-1]["workers"], records[-1]["exchanges"]) == (2, 4)
    assert "served part 0 of centre 0" in (tmp_path / "run/logs/rank2.log").read_text()
    told = [(tmp_path / f"run/logs/rank{rank}.log").read_text() for rank in range(3)]
    assert all(f"rank {rank} of 3, started by mpiexec" in text for rank, text in enumerate(told))
