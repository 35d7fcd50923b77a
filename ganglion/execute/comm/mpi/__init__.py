"""Messages and collectives over MPI.

mpi4py is imported by `load_mpi` only, when MPI is used; the group and transport come after it.
"""

from ganglion.execute.comm.mpi.world import (
    MpiGroupFactory,
    load_mpi,
    meeting_point,
    mpi_launch,
    open_mpi_world,
)

__all__ = ["MpiGroupFactory", "load_mpi", "meeting_point", "mpi_launch", "open_mpi_world"]
