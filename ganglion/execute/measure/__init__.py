"""Measurements of this machine and of a run: peak rate, block costs, memory, descriptions.

Models and worlds are measured; nothing here decides on a plan.
"""

from ganglion.execute.measure.block_costs import Sample, agreed_costs, guessed_costs, measured_costs
from ganglion.execute.measure.describe import SampleOutline, classes_of, describe_model
from ganglion.execute.measure.memory import (
    MemoryWatch,
    SavedBytes,
    held_bytes,
    keep_freed_memory,
    return_large_blocks,
)
from ganglion.execute.measure.peak import count_flops, machine_peak
from ganglion.execute.measure.profile import (
    Mark,
    ModelCase,
    Pairs,
    ProductTime,
    ProfileSizes,
    Taken,
    TierRates,
    Watch,
    overlap_share,
    profile_sizes,
    since,
    time_messages,
    time_products,
    time_rings,
    time_tiers,
    undisturbed,
)

__all__ = [
    "Mark",
    "MemoryWatch",
    "ModelCase",
    "Pairs",
    "ProductTime",
    "ProfileSizes",
    "Sample",
    "SampleOutline",
    "SavedBytes",
    "Taken",
    "TierRates",
    "Watch",
    "agreed_costs",
    "classes_of",
    "count_flops",
    "describe_model",
    "guessed_costs",
    "held_bytes",
    "keep_freed_memory",
    "machine_peak",
    "measured_costs",
    "overlap_share",
    "profile_sizes",
    "return_large_blocks",
    "since",
    "time_messages",
    "time_products",
    "time_rings",
    "time_tiers",
    "undisturbed",
]
