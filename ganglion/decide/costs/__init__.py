"""Costs: cluster files, times of stages, layers and messages, and memory by category.

A cost follows from shapes, a plan and a cluster alone; run files and the clock do not enter.
"""

from ganglion.decide.costs.axonn import AxonnTimes, axonn_times, prefix_rate
from ganglion.decide.costs.block_times import (
    BlockTimes,
    BlockWork,
    ComputeClock,
    LayerClock,
    LayerTimes,
    layer_times,
    model_work,
)
from ganglion.decide.costs.cluster import Cluster, Compute, Link, PrefixRates, Runtime, Tier
from ganglion.decide.costs.cluster_file import (
    builtin_clusters,
    find_cluster,
    parse_cluster,
    read_cluster,
)
from ganglion.decide.costs.flops import BatchFlops, batch_flops
from ganglion.decide.costs.memory import (
    CATEGORIES,
    FP32,
    MIXED,
    TWO_MASTERS,
    Memory,
    StateRules,
    arriving_copies,
    center_copies,
    moved_to_tier,
    server_copies,
    state_entries,
    state_memory,
    stored_sizes,
)
from ganglion.decide.costs.network import Ring, link_between, ring_of, slowest_ring
from ganglion.decide.costs.recompute import (
    Choice,
    RankBlocks,
    choose_recomputed,
    segments,
    written,
)
from ganglion.decide.costs.stages import (
    balanced_boundaries,
    computed_again,
    held_blocks,
    stage_times,
    stage_times_from_file,
    with_blocking_messages,
)
from ganglion.decide.costs.tensor_bytes import (
    PAPER,
    Matmul,
    Repeats,
    Traffic,
    gpt_matmuls,
    ring_sent,
    tensor_traffic,
)
from ganglion.decide.costs.times import StageTimes, injection_limit
from ganglion.decide.costs.two_bw import two_bw_batch_s, two_bw_step_s
from ganglion.decide.costs.working_memory import (
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
    "AxonnTimes",
    "BatchFlops",
    "BlockTimes",
    "BlockWork",
    "Choice",
    "Cluster",
    "Compute",
    "ComputeClock",
    "LayerClock",
    "LayerTimes",
    "Link",
    "Matmul",
    "Memory",
    "PrefixRates",
    "RankBlocks",
    "Repeats",
    "Ring",
    "Runtime",
    "StageBlocks",
    "StageTimes",
    "StateRules",
    "Tier",
    "Traffic",
    "activation_memory",
    "arriving_copies",
    "axonn_times",
    "balanced_boundaries",
    "batch_flops",
    "builtin_clusters",
    "center_copies",
    "choose_recomputed",
    "computed_again",
    "find_cluster",
    "gathered_blocks",
    "gathered_memory",
    "gpt_matmuls",
    "held_blocks",
    "injection_limit",
    "layer_times",
    "link_between",
    "message_memory",
    "model_work",
    "moved_to_tier",
    "parse_cluster",
    "prefix_rate",
    "read_cluster",
    "ring_of",
    "ring_sent",
    "segments",
    "server_copies",
    "slowest_ring",
    "stage_times",
    "stage_times_from_file",
    "state_entries",
    "state_memory",
    "stored_sizes",
    "tensor_traffic",
    "two_bw_batch_s",
    "two_bw_step_s",
    "with_blocking_messages",
    "with_norm",
    "written",
]
