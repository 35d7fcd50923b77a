"""Messages and collectives between threads of one process."""

from ganglion.execute.comm.local.group import run_threads
from ganglion.execute.comm.local.transport import Faults, LocalMail

__all__ = ["Faults", "LocalMail", "run_threads"]
