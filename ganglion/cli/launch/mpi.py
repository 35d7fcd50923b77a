"""Training under mpiexec: the launcher, and the main of a rank.

    ganglion train --transport mpi  ->  mpiexec -n N python -m ganglion.cli.launch.mpi FOLDER ...

MPI waits for ever for a rank that has failed, so a rank that fails ends all of them at once.
mpiexec passes Ctrl-C on to the ranks, and ends them all when one dies or when it is killed itself.
"""

from __future__ import annotations

import importlib.util
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ganglion.decide.config import LOGS
from ganglion.errors import GanglionError, LaunchError, PeerLost

if TYPE_CHECKING:
    from ganglion.cli.train import TrainOptions
    from ganglion.decide.config import RunFile
    from ganglion.decide.plan import Plan
    from ganglion.decide.topology import Launch

FAILED = 1
INTERRUPTED = 130
_MPIEXEC_STDOUT = "mpiexec.stdout"
_OBITUARY = "=" * 40
_REMEDY = "install both with pip install 'ganglion[mpi]'"
_SETTLE_S = 0.3


def find_mpiexec(python: Path, path: str | None) -> str:
    """Return the mpiexec beside `python`, where pip puts it, or else the one of `path`."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(f"--transport mpi needs mpi4py and an mpiexec: {_REMEDY}")
    found = shutil.which("mpiexec", path=str(python.parent)) or shutil.which("mpiexec", path=path)
    if found is None:
        raise LaunchError(
            f"--transport mpi needs mpiexec, which is neither beside {python} nor on PATH: "
            f"{_REMEDY}, or load your cluster's MPI"
        )
    return found


def require_mpiexec() -> str:
    """Return the mpiexec to use, or raise LaunchError with a remedy."""
    return find_mpiexec(Path(sys.executable), os.environ.get("PATH"))


def run_under_mpiexec(
    folder: Path, num_processes: int, resume: bool, log_level: str, received: list[int]
) -> int:
    """Train in processes of mpiexec; return 0, 1 after a failure, 128 + signal when interrupted.

    `received` is the list of `forwarded_signals()`, which passes signals on to mpiexec.
    """
    logs = folder / LOGS
    for old in logs.glob("rank*.error.txt"):
        old.unlink()
    mode = "resume" if resume else "start"
    rank = [sys.executable, "-m", "ganglion.cli.launch.mpi", str(folder), log_level, mode]
    command = [require_mpiexec(), "-n", str(num_processes), *rank]
    command += [str(os.getpid()), socket.gethostname()]
    if received:
        return 128 + received[0]
    code = _run(command, logs)
    if code and (not received or (len(received) == 1 and _failures(logs))):
        show_failure(logs, code)
        return FAILED
    return 128 + received[0] if received else 0


def _run(command: list[str], logs: Path) -> int:
    """Run mpiexec in a session of its own, since `forwarded_signals` passes Ctrl-C on."""
    with (logs / "mpiexec.stderr").open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            show_progress(process.stdout, logs / _MPIEXEC_STDOUT)
            return process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def show_progress(lines: Iterable[str], log: Path) -> None:
    """Print the output of rank 0; write the report that mpiexec prints after a death to `log`."""
    with log.open("w", encoding="utf-8") as file:
        died = False
        for line in lines:
            died = died or line.startswith(_OBITUARY)
            if died:
                file.write(line)
            else:
                typer.echo(line, nl=False)


def show_failure(logs: Path, code: int) -> None:
    """Print the first failure, with its rank; the others mostly follow from it."""
    failures = _failures(logs)
    if failures:
        typer.echo(f"\n{failures[0].rstrip()}", err=True)
    else:
        report = _report_of_mpiexec((logs / _MPIEXEC_STDOUT).read_text(errors="replace"))
        typer.echo(
            f"\nerror: a rank died and mpiexec ended the others, code {code}{report}", err=True
        )
    typer.echo(f"logs of all ranks: {logs}", err=True)


def _failures(logs: Path) -> list[str]:
    """Return the errors that ranks wrote, the cause first and lost peers last."""
    files = sorted(logs.glob("rank*.error.txt"), key=lambda path: path.stat().st_mtime_ns)
    texts = [path.read_text(encoding="utf-8") for path in files]
    return sorted(texts, key=lambda text: "PeerLost" in text)


def _report_of_mpiexec(text: str) -> str:
    """Return process, host and cause from the report of mpiexec, as far as they are there."""
    match = re.search(r"PID (\d+) RUNNING AT (\S+)", text)
    how = re.search(r"EXIT STRING: (.+)", text)
    parts = [f"process {match[1]} on {match[2]}"] if match else []
    parts += [how[1].strip()] if how else []
    return f" ({', '.join(parts)})" if parts else ""


def train_as_mpi_rank(
    file: RunFile, plan: Plan, name: str, launch: Launch, options: TrainOptions
) -> int:
    """Train as one of the processes that the user's own mpiexec started."""
    from ganglion.cli.launch.rank_main import train_under_launcher

    with failing_together(launch.rank):
        return train_under_launcher(file, plan, name, launch, options) or 0


@contextmanager
def failing_together(rank: int, logs: Path | None = None) -> Iterator[None]:
    """End all ranks if the body raises, after writing the error to the screen and to `logs`."""
    try:
        yield
    except KeyboardInterrupt:
        _abort(INTERRUPTED)
    except Exception as error:
        text = failure_text(rank, error)
        # The cause comes first, and an error that all ranks have is shown once.
        time.sleep(_SETTLE_S * (6 if isinstance(error, PeerLost) else 3 * min(rank, 1)))
        if logs is not None:
            (logs / f"rank{rank}.error.txt").write_text(text, encoding="utf-8")
        typer.echo(text, err=True, nl=False)
        time.sleep(_SETTLE_S)  # mpiexec throws away output that it has not read
        _abort(FAILED)


def failure_text(rank: int, error: Exception) -> str:
    """Return one line for an error of ours, or a line and the stack for any other."""
    line = f"error: rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, GanglionError):
        return line + "\n"
    return line + "\n" + "".join(traceback.format_exception(error))


def _abort(code: int) -> None:
    from ganglion.execute.comm.mpi import load_mpi

    sys.stdout.flush()
    sys.stderr.flush()
    load_mpi().COMM_WORLD.Abort(code)


def end_with_launcher(pid: int, host: str) -> None:
    """End this process when the one that started mpiexec is gone, if it is on this host."""
    if host != socket.gethostname():
        return
    try:
        launcher = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(FAILED)

    def watch() -> None:
        select.select([launcher], [], [])
        os._exit(FAILED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _keep_streams(logs: Path, rank: int) -> None:
    """Send this rank's streams to `logs`; only rank 0 keeps the terminal, for the progress."""
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        if rank or name == "stderr":
            with (logs / f"rank{rank}.{name}").open("wb") as file:
                os.dup2(file.fileno(), stream.fileno())


def main() -> None:
    """Train as a rank that `ganglion train` started: FOLDER LOG_LEVEL MODE PID HOST."""
    folder, level, mode, pid, host = Path(sys.argv[1]), *sys.argv[2:6]
    end_with_launcher(int(pid), host)
    from ganglion.execute.comm.mpi import mpi_launch

    launch = mpi_launch()
    with failing_together(launch.rank, folder / LOGS):
        _keep_streams(folder / LOGS, launch.rank)
        _train(folder, level, launch, resume=mode == "resume")


def _train(folder: Path, level: str, launch: Launch, *, resume: bool) -> None:
    from ganglion.cli.environment import log_to_screen
    from ganglion.cli.folder import read_folder
    from ganglion.cli.launch.rank_main import meeting_place, train_in_folder
    from ganglion.execute.comm.mpi import open_mpi_world

    log_to_screen(level, sys.stdout)
    file, plan = read_folder(folder, resumed=resume)
    timeout_s = file.train.timeout_s
    # With servers, only some of the processes form a world: `train_in_folder` opens it.
    world = None if plan.servers else open_mpi_world(plan.mesh(), timeout_s)
    with meeting_place(launch, plan, timeout_s) as launch:
        # mpiexec forwards a request to stop, and another process may send it too.
        train_in_folder(folder, launch, resume=resume, world=world, end_on_second=False)


if __name__ == "__main__":
    main()
