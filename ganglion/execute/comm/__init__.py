"""Communication between ranks: messages between two, and collectives of groups.

The contracts stand here, and `shm`, `torch`, `mpi` and `local` implement them. MPI is imported only
when it is used. Nothing here knows of models, schedules or training.
"""

from ganglion.execute.comm.background import Background
from ganglion.execute.comm.collectives import (
    MAX,
    SUM,
    DoneHandle,
    Group,
    Handle,
    SoloGroup,
    empty_for,
)
from ganglion.execute.comm.hosts import this_host
from ganglion.execute.comm.local import Faults, run_threads
from ganglion.execute.comm.message import Arrival, Header
from ganglion.execute.comm.reduce_order import combine_two, tree_pairs
from ganglion.execute.comm.rendezvous import open_store, open_world, torch_world
from ganglion.execute.comm.traced import labelled, plain_group
from ganglion.execute.comm.transport import Transport, timeout_error
from ganglion.execute.comm.world import World, broadcast_tensor, broadcast_text

__all__ = [
    "MAX",
    "SUM",
    "Arrival",
    "Background",
    "DoneHandle",
    "Faults",
    "Group",
    "Handle",
    "Header",
    "SoloGroup",
    "Transport",
    "World",
    "broadcast_tensor",
    "broadcast_text",
    "combine_two",
    "empty_for",
    "labelled",
    "open_store",
    "open_world",
    "plain_group",
    "run_threads",
    "this_host",
    "timeout_error",
    "torch_world",
    "tree_pairs",
]
