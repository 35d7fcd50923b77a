"""Host memory that was freed: kept by the process, or given back to the kernel at once.

glibc hands large freed blocks back to the kernel, and learns to keep middling ones. Training frees
and needs the same activations for every microbatch, so each one pays for thousands of page faults
and for zeroed pages: 120,000 faults a step, 2.5 % of the time, for the GPT of
`benchmarks/data_parallel.py`. So freed memory is kept, as long as there is enough:

    keep     a heap with holes between tensors that live long: quick, and up to a fifth larger than
             what is in use
    return   every block of 128 KiB or more is a mapping of its own: resident is what is in use
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
_ALWAYS_FROM_HEAP = 2**30
_LARGE = 2**17


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory; return False where it cannot be told."""
    return _tell(_M_MMAP_THRESHOLD, _ALWAYS_FROM_HEAP) and _tell(_M_TRIM_THRESHOLD, _NEVER)


def return_large_blocks() -> bool:
    """Tell the C library to give large blocks back when they are freed; False where it cannot be.

    For runs that have little memory rather than little time. Aligned blocks of equal size do not
    fit where the one before was, so a heap that keeps them grows by more than is ever in use.
    """
    return _tell(_M_MMAP_THRESHOLD, _LARGE) and _tell(_M_TRIM_THRESHOLD, _LARGE)


def _tell(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Another C library has habits of its own.
    return mallopt is not None and bool(mallopt(option, value))
