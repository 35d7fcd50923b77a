"""What things cost: cluster files, times of stages and links, and limits that follow from them."""

from ganglion.costs.blocks import BlockCost, conv_blocks, gpt_blocks, mlp_blocks
from ganglion.costs.cluster import Cluster, Link, builtin_clusters, find_cluster, read_cluster
from ganglion.costs.limit import injection_limit
from ganglion.costs.network import Ring, link_between, rings_along
from ganglion.costs.stages import balanced_boundaries, stage_times, stage_times_from_file
from ganglion.costs.times import StageTimes

__all__ = [
    "BlockCost",
    "Cluster",
    "Link",
    "Ring",
    "StageTimes",
    "balanced_boundaries",
    "builtin_clusters",
    "conv_blocks",
    "find_cluster",
    "gpt_blocks",
    "injection_limit",
    "link_between",
    "mlp_blocks",
    "read_cluster",
    "rings_along",
    "stage_times",
    "stage_times_from_file",
]
