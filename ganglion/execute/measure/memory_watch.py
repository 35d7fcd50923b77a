"""What a rank really holds while it trains: tensors by category, and the peak of all memory.

    before the model     warm up, so that libraries have loaded what they load; note the baseline
    first steps          count what autograd saves (train/saved_bytes.py)
    every step           peak so far, above the baseline
    end                  tensors of the run by category, each piece of memory once

On a GPU the peak is that of torch's allocator. On a CPU it is that of the resident memory of the
process, where pages that ranks share count for each in part. It contains what the C library keeps
of freed memory and what math libraries put aside, so it is never below what tensors need.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ganglion.decide.shapes import GPTShape
from ganglion.execute.models import build_model, cross_entropy

_KIB = 1024
_TINY = GPTShape(
    vocab_size=256,
    seq_len=64,
    num_layers=1,
    hidden=64,
    num_heads=4,
    num_kv_heads=4,
    head_size=16,
    mlp_hidden=256,
)


class MemoryWatch:
    """Tells how far the memory of this process has grown since the watch was made."""

    def __init__(self, device: torch.device) -> None:
        """Note the baseline: make it before the model."""
        _warm_up(device)
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.baseline_bytes = int(torch.cuda.memory_allocated(device))
        else:
            self.baseline_bytes = _status("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most bytes above the baseline so far; on a CPU with all shared pages."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self.baseline_bytes
        return _status("VmHWM") - self.baseline_bytes

    def foreign_bytes(self) -> int:
        """Return the part of shared pages, of messages and buckets, that is other ranks'.

        The kernel walks all pages for it: ask once.
        """
        return 0 if self._device.type == "cuda" else _counted_elsewhere()


def held_bytes(tensors: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Return the memory behind tensors by category, each piece once, where it comes first."""
    seen: set[int] = set()
    found = dict.fromkeys(tensors, 0)
    for category, members in tensors.items():
        for tensor in members:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[category] += storage.nbytes()
    return found


def _warm_up(device: torch.device) -> None:
    """Train a tiny model: torch imports and maps what every training needs, 30 MB or so."""
    model = build_model(_TINY).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(2, _TINY.seq_len, dtype=torch.long, device=device)
    for _ in range(2):  # gradients are made once and added to later
        cross_entropy(model(ids), ids).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _status(key: str) -> int:
    """Return a number of bytes that the kernel tells of this process."""
    if not sys.platform.startswith("linux"):  # knows of no present size, so of no baseline
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * _KIB
    return 0


def _counted_elsewhere() -> int:
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    part = [int(line.split()[1]) * _KIB for line in lines if line.startswith("Pss_Shmem:")]
    return max(0, _status("RssShmem") - part[0]) if part else 0
