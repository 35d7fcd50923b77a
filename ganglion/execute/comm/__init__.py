"""How ranks talk: messages between two, and collectives of groups that can be awaited later."""

from ganglion.execute.comm.background import Background
from ganglion.execute.comm.choice import TRANSPORTS
from ganglion.execute.comm.collectives import MAX, SUM, Done, Group, Handle, SoloGroup, empty_for
from ganglion.execute.comm.hosts import this_host
from ganglion.execute.comm.local import Faults, LocalMail, run_threads
from ganglion.execute.comm.message import Arrival, Header
from ganglion.execute.comm.reduce_order import join, tree_pairs
from ganglion.execute.comm.rendezvous import open_store, open_world, torch_world
from ganglion.execute.comm.traced import labelled, plain_group
from ganglion.execute.comm.transport import Transport, silence
from ganglion.execute.comm.world import World, broadcast_tensor, broadcast_text

__all__ = [
    "MAX",
    "SUM",
    "TRANSPORTS",
    "Arrival",
    "Background",
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
    "join",
    "labelled",
    "open_store",
    "open_world",
    "plain_group",
    "run_threads",
    "silence",
    "this_host",
    "torch_world",
    "tree_pairs",
]
