"""A served centre: its wire, its server, and the methods that exchange with it."""

from ganglion.execute.averaging.served.methods import ServedSgd
from ganglion.execute.averaging.served.server import ServerMetrics
from ganglion.execute.averaging.served.server_process import (
    CountingStore,
    ServerProcess,
    announce_end,
    own_server,
)
from ganglion.execute.averaging.served.serving import Hosting, served_method

__all__ = [
    "CountingStore",
    "Hosting",
    "ServedSgd",
    "ServerMetrics",
    "ServerProcess",
    "announce_end",
    "own_server",
    "served_method",
]
