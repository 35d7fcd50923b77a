"""Messages and collectives through MPI."""

from ganglion.execute.comm.mpi.world import (
    MpiMeeting,
    load_mpi,
    meeting_point,
    mpi_launch,
    open_mpi_world,
)

__all__ = ["MpiMeeting", "load_mpi", "meeting_point", "mpi_launch", "open_mpi_world"]
