"""Where ranks are: the mesh of axes, its groups, and which axes split or replicate a parameter.

Pure arithmetic on numbers and names; it imports no other room.
"""

from ganglion.decide.topology.cuts import (
    BATCH,
    GROUP,
    LAYER,
    NORMAL,
    RMS,
    TRANSPOSED,
    WHOLE,
    Cut,
    DropoutCut,
    EmbeddingCut,
    LinearCut,
    ModelCuts,
    NormCut,
    WidthCut,
)
from ganglion.decide.topology.launch import Launch, read_launch
from ganglion.decide.topology.mesh import AXES, DEFAULT_RANK_ORDER, Coordinates, Mesh
from ganglion.decide.topology.placement import TENSOR_AXES, Box, Placement, Shard

__all__ = [
    "AXES",
    "BATCH",
    "DEFAULT_RANK_ORDER",
    "GROUP",
    "LAYER",
    "NORMAL",
    "RMS",
    "TENSOR_AXES",
    "TRANSPOSED",
    "WHOLE",
    "Box",
    "Coordinates",
    "Cut",
    "DropoutCut",
    "EmbeddingCut",
    "Launch",
    "LinearCut",
    "Mesh",
    "ModelCuts",
    "NormCut",
    "Placement",
    "Shard",
    "WidthCut",
    "read_launch",
]
