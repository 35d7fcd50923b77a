"""How ranks talk: groups of ranks along mesh axes, and collectives that can be awaited later."""

from ganglion.comm.collectives import MAX, SUM, Done, Group, Handle, SoloGroup
from ganglion.comm.local import run_threads
from ganglion.comm.rendezvous import open_world, torch_world
from ganglion.comm.world import World

__all__ = [
    "MAX",
    "SUM",
    "Done",
    "Group",
    "Handle",
    "SoloGroup",
    "World",
    "open_world",
    "run_threads",
    "torch_world",
]
