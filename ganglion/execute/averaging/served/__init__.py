"""A centre that one process serves to workers which exchange on their own.

Holds the wire format, the server, the client and the methods that use them. Synchronous methods
and shared memory do not belong here: they are in `methods`.
"""

from ganglion.execute.averaging.served.local_server import CenterHost, async_method
from ganglion.execute.averaging.served.methods import ServedSgd
from ganglion.execute.averaging.served.server import ServerMetrics
from ganglion.execute.averaging.served.server_process import (
    CountingStore,
    ServerProcess,
    announce_end,
    own_server,
)

__all__ = [
    "CenterHost",
    "CountingStore",
    "ServedSgd",
    "ServerMetrics",
    "ServerProcess",
    "announce_end",
    "async_method",
    "own_server",
]
