"""Messages and collectives inside a host, through Unix sockets and shared memory.

Nothing here crosses a host or touches a GPU.
"""

from ganglion.execute.comm.shm.group import ShmGroup
from ganglion.execute.comm.shm.transport import INLINE_BYTES, ShmTransport, open_shm_transport
from ganglion.execute.comm.shm.unix_mesh import connect_mesh

__all__ = ["INLINE_BYTES", "ShmGroup", "ShmTransport", "connect_mesh", "open_shm_transport"]
