"""Messages and collectives between threads of one process, for tests."""

from ganglion.execute.comm.local.group import run_threads
from ganglion.execute.comm.local.transport import Faults

__all__ = ["Faults", "run_threads"]
