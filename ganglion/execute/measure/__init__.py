"""Measurements of this machine and of a run: peak rates, block costs, memory."""

from ganglion.execute.measure.block_costs import Sample, agreed_costs, guessed_costs, measured_costs
from ganglion.execute.measure.host_memory import keep_freed_memory, return_large_blocks
from ganglion.execute.measure.memory_watch import MemoryWatch, held_bytes
from ganglion.execute.measure.peak import count_flops, machine_peak
from ganglion.execute.measure.saved_bytes import SavedBytes

__all__ = [
    "MemoryWatch",
    "Sample",
    "SavedBytes",
    "agreed_costs",
    "count_flops",
    "guessed_costs",
    "held_bytes",
    "keep_freed_memory",
    "machine_peak",
    "measured_costs",
    "return_large_blocks",
]
