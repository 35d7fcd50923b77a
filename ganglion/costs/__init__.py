"""What things cost: cluster files, times of stages and links, and limits that follow from them."""

from ganglion.costs.blocks import BlockCost, conv_blocks, gpt_blocks, mlp_blocks
from ganglion.costs.cluster import Cluster, Link, builtin_clusters, find_cluster, read_cluster
from ganglion.costs.limit import injection_limit
from ganglion.costs.network import Ring, link_between, rings_along
from ganglion.costs.stages import balanced_boundaries, stage_times, stage_times_from_file
from ganglion.costs.tensor_bytes import (
    PAPER,
    Matmul,
    Repeats,
    Traffic,
    gpt_matmuls,
    ring_sent,
    tensor_traffic,
)
from ganglion.costs.times import StageTimes

__all__ = [
    "PAPER",
    "BlockCost",
    "Cluster",
    "Link",
    "Matmul",
    "Repeats",
    "Ring",
    "StageTimes",
    "Traffic",
    "balanced_boundaries",
    "builtin_clusters",
    "conv_blocks",
    "find_cluster",
    "gpt_blocks",
    "gpt_matmuls",
    "injection_limit",
    "link_between",
    "mlp_blocks",
    "read_cluster",
    "ring_sent",
    "rings_along",
    "stage_times",
    "stage_times_from_file",
    "tensor_traffic",
]
