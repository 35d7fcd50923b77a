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

__all__ = [
    "MemoryWatch",
    "Sample",
    "SampleOutline",
    "SavedBytes",
    "agreed_costs",
    "classes_of",
    "count_flops",
    "describe_model",
    "guessed_costs",
    "held_bytes",
    "keep_freed_memory",
    "machine_peak",
    "measured_costs",
    "return_large_blocks",
]
