"""What things cost: cluster files, times of stages and links, and limits that follow from them."""

from ganglion.costs.activation_budget import Choice, RankBlocks, choose_recomputed
from ganglion.costs.activations import (
    BlockActivations,
    Layout,
    conv_activations,
    gpt_activations,
    mlp_activations,
)
from ganglion.costs.blocks import BlockCost, conv_blocks, gpt_blocks, mlp_blocks
from ganglion.costs.cluster import Cluster, Link, builtin_clusters, find_cluster, read_cluster
from ganglion.costs.layer_times import LayerTimes, layer_times
from ganglion.costs.limit import injection_limit
from ganglion.costs.memory import (
    CATEGORIES,
    FP32,
    MIXED,
    TWO_MASTERS,
    Formats,
    Memory,
    StateRules,
    Tier,
    moved_to_tier,
    state_entries,
    state_memory,
)
from ganglion.costs.network import Ring, link_between, rings_along
from ganglion.costs.parameters import (
    Parameter,
    conv_parameters,
    gpt_parameters,
    mlp_parameters,
)
from ganglion.costs.segments import num_near_root, segments, written
from ganglion.costs.split_layers import (
    BlockLayers,
    SplitLayer,
    conv_layers,
    gpt_layers,
    mlp_layers,
)
from ganglion.costs.stages import (
    balanced_boundaries,
    held_blocks,
    stage_times,
    stage_times_from_file,
)
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
from ganglion.costs.working_memory import (
    StageBlocks,
    activation_memory,
    gathered_blocks,
    gathered_memory,
    message_memory,
    with_norm,
)

__all__ = [
    "CATEGORIES",
    "FP32",
    "MIXED",
    "PAPER",
    "TWO_MASTERS",
    "BlockActivations",
    "BlockCost",
    "BlockLayers",
    "Choice",
    "Cluster",
    "Formats",
    "LayerTimes",
    "Layout",
    "Link",
    "Matmul",
    "Memory",
    "Parameter",
    "RankBlocks",
    "Repeats",
    "Ring",
    "SplitLayer",
    "StageBlocks",
    "StageTimes",
    "StateRules",
    "Tier",
    "Traffic",
    "activation_memory",
    "balanced_boundaries",
    "builtin_clusters",
    "choose_recomputed",
    "conv_activations",
    "conv_blocks",
    "conv_layers",
    "conv_parameters",
    "find_cluster",
    "gathered_blocks",
    "gathered_memory",
    "gpt_activations",
    "gpt_blocks",
    "gpt_layers",
    "gpt_matmuls",
    "gpt_parameters",
    "held_blocks",
    "injection_limit",
    "layer_times",
    "link_between",
    "message_memory",
    "mlp_activations",
    "mlp_blocks",
    "mlp_layers",
    "mlp_parameters",
    "moved_to_tier",
    "num_near_root",
    "read_cluster",
    "ring_sent",
    "rings_along",
    "segments",
    "stage_times",
    "stage_times_from_file",
    "state_entries",
    "state_memory",
    "tensor_traffic",
    "with_norm",
    "written",
]
