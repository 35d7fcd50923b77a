"""Host memory that was freed stays with the process, so that the next microbatch finds it warm.

glibc hands large freed blocks back to the kernel. Training frees and needs the same activations
for every microbatch, so each one pays for thousands of page faults and for zeroed pages: 120,000
faults a step, 2.5 % of the time, for the GPT of `benchmarks/data_parallel.py`.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
_ALWAYS_FROM_HEAP = 2**30


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory; return False where it cannot be told."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, with habits of its own
        return False
    told = [mallopt(_M_MMAP_THRESHOLD, _ALWAYS_FROM_HEAP), mallopt(_M_TRIM_THRESHOLD, _NEVER)]
    return all(told)
