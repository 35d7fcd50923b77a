"""Local ranks through torch elastic: started together, ended together, errors shown once."""

from __future__ import annotations

import logging
import uuid
from datetime import timedelta
from pathlib import Path

import typer
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ganglion.cli.launch.rank_server import run_rank
from ganglion.decide.config import LOGS

FAILED = 1
_RENDEZVOUS = "ganglion_local"
_HOST = "localhost"
_TIMEOUT_S = 60
_CAUSE = "The above exception was the direct cause of the following exception"
_INSIDE = "ganglion.errors.PipelineError"


class StoppedBeforeStart(Exception):
    """A signal to stop came before there was a rank to pass it on to."""


class LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of processes that one launcher starts on one host.

    torch's own rendezvous for a free port ("c10d") is made for many hosts: it waits for a random
    time and records its whole call stack at each step, which takes half a second here. The store
    is open before its port is known, so that no other process takes the port.
    """

    def __init__(self, run_id: str) -> None:
        """Open the store on a free port."""
        store = TCPStore(_HOST, 0, is_master=True, timeout=timedelta(seconds=_TIMEOUT_S))
        super().__init__(_HOST, store.port, rank=0, world_size=1, run_id=run_id, timeout=_TIMEOUT_S)
        self._store = store

    def get_backend(self) -> str:
        """Return the name under which torch elastic knows this class."""
        return _RENDEZVOUS


class RankLogs(LogsSpecs):
    """Streams of each rank go to `logs/`; only rank 0 keeps the terminal, for the progress."""

    def __init__(self, folder: Path, received: list[int]) -> None:
        """Write below `folder`; start no rank once a signal has been `received`."""
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._received = received

    @property
    def root_log_dir(self) -> str:
        """The folder of the logs."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of every rank, also of its error; torch elastic starts them next."""
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
        # After a second signal the ranks are killed: what they report then is no failure.
        if not received or (len(received) == 1 and _recorded_failures(error)):
            show_failure(error, folder)
            return FAILED
    except StoppedBeforeStart:
        pass
    return 128 + received[0] if received else 0


def launch_config(
    num_processes: int, logs: LogsSpecs | None = None, start_method: str = "spawn"
) -> LaunchConfig:
    """Return the settings of one group of local processes on a free port, without restarts."""
    rendezvous_handler_registry.register(_RENDEZVOUS, _rendezvous)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend=_RENDEZVOUS,
        rdzv_endpoint=_HOST,
        local_addr=_HOST,
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=logs,
        start_method=start_method,
        # Ctrl-C is ours: the ranks save a checkpoint and end by themselves.
        signals_to_handle="SIGQUIT",
    )


def _rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def show_failure(error: ChildFailedError, folder: Path) -> None:
    """Print the first failure, with its rank; ranks that only saw another fail end later."""
    rank, failure = error.get_first_failure()
    message, trace = _recorded(failure)
    typer.echo(f"\nerror: rank {rank} failed: {message}", err=True)
    if trace and not _needs_no_trace(trace):
        typer.echo(trace.rstrip(), err=True)
    typer.echo(f"logs of all ranks: {folder / LOGS}", err=True)


def _recorded_failures(error: ChildFailedError) -> list[ProcessFailure]:
    """Return the failures with a recorded message: a rank ended by a signal records none."""
    return [f for f in error.failures.values() if isinstance(_message(f), dict)]


def _message(failure: ProcessFailure) -> object:
    return failure.error_file_data.get("message", "")


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """Return the recorded message and traceback of a rank, as far as there are any."""
    record = _message(failure)
    if not isinstance(record, dict):
        return failure.message, ""
    message = str(record.get("message", failure.message))
    return message, str(record.get("extraInfo", {}).get("py_callstack", ""))


def _needs_no_trace(trace: str) -> bool:
    """Return whether the message is enough: an error of ours, not raised by a stage's own code."""
    last = trace.rstrip().rsplit("\n", 1)[-1]
    failed_inside = last.startswith(_INSIDE) and _CAUSE in trace
    return last.startswith("ganglion.errors.") and not failed_inside
