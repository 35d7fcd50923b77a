"""Local processes through torch elastic: started together, ended together, errors shown once."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import typer
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ganglion.cli.rank_server import run_rank
from ganglion.cli.rendezvous import LOCAL_RENDEZVOUS, register_local_rendezvous
from ganglion.decide.config import LOGS

FAILED = 1
_CAUSE = "The above exception was the direct cause of the following exception"
_INSIDE = "ganglion.errors.PipelineError"


class StoppedBeforeStart(Exception):
    """A signal to stop came before there was a worker to pass it on to."""


class RankLogs(LogsSpecs):
    """Streams of each rank go to `logs/`; only rank 0 keeps the terminal, for the progress."""

    def __init__(self, folder: Path, received: list[int]) -> None:
        """Write below `folder`; start nobody once a signal has been `received`."""
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._received = received

    @property
    def root_log_dir(self) -> str:
        """The folder of the logs."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name every rank's files and tell it where to leave its error; elastic starts it next."""
        if self._received:
            raise StoppedBeforeStart
        destination = LogsDest()
        for rank, environment in envs.items():
            error_file = self._folder / f"rank{rank}.error.json"
            error_file.unlink(missing_ok=True)
            environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            destination.error_files[rank] = str(error_file)
            destination.stderrs[rank] = str(self._folder / f"rank{rank}.stderr")
            destination.stdouts[rank] = (
                "" if rank == 0 else str(self._folder / f"rank{rank}.stdout")
            )
        return destination


def run_processes(
    folder: Path,
    num_processes: int,
    resume: bool,
    log_level: str,
    received: list[int],
    *,
    module: str,
) -> int:
    """Run `main` of `module` in local processes, which `start_rank_server(module)` has prepared.

    Return 0, 1 after a failure, 128 + signal when interrupted.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = [module, str(folder), log_level, "resume" if resume else ""]
    logs = RankLogs(folder / LOGS, received)
    try:
        elastic_launch(launch_config(num_processes, logs, "forkserver"), run_rank)(*arguments)
    except ChildFailedError as error:
        # After a second signal the workers are killed, and what they say of it is no failure.
        if not received or (len(received) == 1 and _told(error)):
            show_failure(error, folder)
            return FAILED
    except StoppedBeforeStart:
        pass
    return 128 + received[0] if received else 0


def launch_config(
    num_processes: int, logs: LogsSpecs | None = None, start_method: str = "spawn"
) -> LaunchConfig:
    """Return the settings of one group of local processes on a free port, without restarts."""
    register_local_rendezvous()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend=LOCAL_RENDEZVOUS,
        rdzv_endpoint="localhost",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=logs,
        start_method=start_method,
        # Ctrl-C is ours: the workers save a checkpoint and leave by themselves.
        signals_to_handle="SIGQUIT",
    )


def show_failure(error: ChildFailedError, folder: Path) -> None:
    """Print the first failure, with its rank; ranks that only saw another fail end later."""
    rank, failure = error.get_first_failure()
    message, trace = _read_failure(failure)
    typer.echo(f"\nerror: rank {rank} failed: {message}", err=True)
    if trace:
        typer.echo(trace.rstrip(), err=True)
    typer.echo(f"logs of all ranks: {folder / LOGS}", err=True)


def _told(error: ChildFailedError) -> list[ProcessFailure]:
    """Return the failures that left a message: a worker ended by a signal leaves none."""
    return [f for f in error.failures.values() if isinstance(_message(f), dict)]


def _message(failure: ProcessFailure) -> object:
    return failure.error_file_data.get("message", "")


def _read_failure(failure: ProcessFailure) -> tuple[str, str]:
    message, trace = _recorded(failure)
    return message, "" if _is_users(trace) else trace


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """Return the message and the traceback that a process left behind, if it did."""
    record = _message(failure)
    if not isinstance(record, dict):
        return failure.message, ""
    message = str(record.get("message", failure.message))
    return message, str(record.get("extraInfo", {}).get("py_callstack", ""))


def _is_users(trace: str) -> bool:
    """Say whether the error is one of ours, whose message alone tells all.

    One that a stage's own code raised has a traceback worth seeing.
    """
    last = trace.rstrip().rsplit("\n", 1)[-1]
    failed_inside = last.startswith(_INSIDE) and _CAUSE in trace
    return last.startswith("ganglion.errors.") and not failed_inside
