"""The device of a rank and the peak of its memory.

The first room of execute: it imports no other.
"""

from __future__ import annotations

import resource
import sys

import torch


def pick_device(local_rank: int) -> torch.device:
    """Return this rank's GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def peak_bytes(device: torch.device) -> int:
    """Return the peak of bytes held by the allocator of a GPU, or by the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
