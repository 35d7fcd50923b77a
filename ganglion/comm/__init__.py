"""How ranks talk: messages between two, and collectives of groups that can be awaited later."""

from ganglion.comm.choice import TRANSPORTS
from ganglion.comm.collectives import MAX, SUM, Done, Group, Handle, SoloGroup, empty_for
from ganglion.comm.local import run_threads
from ganglion.comm.local_transport import Faults, LocalMail
from ganglion.comm.message import Arrival, Header
from ganglion.comm.rendezvous import open_store, open_world, torch_world
from ganglion.comm.traced import labelled, plain_group
from ganglion.comm.transport import Transport
from ganglion.comm.world import World, broadcast_tensor, broadcast_text

__all__ = [
    "MAX",
    "SUM",
    "TRANSPORTS",
    "Arrival",
    "Done",
    "Faults",
    "Group",
    "Handle",
    "Header",
    "LocalMail",
    "SoloGroup",
    "Transport",
    "World",
    "broadcast_tensor",
    "broadcast_text",
    "empty_for",
    "labelled",
    "open_store",
    "open_world",
    "plain_group",
    "run_threads",
    "torch_world",
]
