"""Starts ranks and runs them: torch elastic, mpiexec, signals, and the main of each kind of rank.

What needs torch is loaded on first use, so that commands answer without it. No command enters here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganglion.cli.launch.rank_server import accept_signals, rank_processes, start_rank_server
from ganglion.cli.launch.signals import StopSignal, forwarded_signals
from ganglion.lazy import lazy_names

if TYPE_CHECKING:
    from ganglion.cli.launch.launcher import launch_config, run_processes
    from ganglion.cli.launch.mpi import require_mpiexec, run_under_mpiexec, train_as_mpi_rank
    from ganglion.cli.launch.probe import SIZES, Probe, probe_ranks
    from ganglion.cli.launch.profile_rank import RankProfile, profile_ranks
    from ganglion.cli.launch.rank_main import train_in_folder, train_under_launcher

__all__ = [
    "SIZES",
    "Probe",
    "RankProfile",
    "StopSignal",
    "accept_signals",
    "forwarded_signals",
    "launch_config",
    "probe_ranks",
    "profile_ranks",
    "rank_processes",
    "require_mpiexec",
    "run_processes",
    "run_under_mpiexec",
    "start_rank_server",
    "train_as_mpi_rank",
    "train_in_folder",
    "train_under_launcher",
]

_HOME = {
    "SIZES": "probe",
    "Probe": "probe",
    "RankProfile": "profile_rank",
    "launch_config": "launcher",
    "probe_ranks": "probe",
    "profile_ranks": "profile_rank",
    "require_mpiexec": "mpi",
    "run_processes": "launcher",
    "run_under_mpiexec": "mpi",
    "train_as_mpi_rank": "mpi",
    "train_in_folder": "rank_main",
    "train_under_launcher": "rank_main",
}

__getattr__ = lazy_names(__name__, _HOME)
