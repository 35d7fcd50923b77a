"""Where ranks sit: the mesh of axes, its groups, and which axes split or replicate a parameter."""

from ganglion.topology.launch import Launch, read_launch
from ganglion.topology.mesh import AXES, DEFAULT_RANK_ORDER, Coordinates, Mesh
from ganglion.topology.placement import Placement, Shard

__all__ = [
    "AXES",
    "DEFAULT_RANK_ORDER",
    "Coordinates",
    "Launch",
    "Mesh",
    "Placement",
    "Shard",
    "read_launch",
]
