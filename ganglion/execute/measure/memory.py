"""The memory of a rank while it trains: its peak, tensors by category, saved activations.

    before the model     warm up, so that libraries have loaded what they load; note the baseline
    first steps          count what autograd saves (`SavedBytes`)
    every step           peak so far, above the baseline
    end                  tensors of the run by category, each storage once

On a GPU the peak is that of torch's allocator. On a CPU it is that of the resident memory of the
process, where pages that ranks share count for each in part. It contains freed memory that the C
library keeps and buffers of math libraries, so it is never below what tensors need.

glibc returns large freed blocks to the kernel, and learns to keep middling ones. Training frees
and needs the same activations for every microbatch, so each one pays for thousands of page faults
and for zeroed pages: 120,000 faults a step, 2.5 % of the time, for the GPT of
`benchmarks/data_parallel.py`. So freed memory is kept, as long as there is enough:

    keep     a heap with holes between tensors that live long: quick, and up to a fifth larger than
             what is in use
    return   every block of 128 KiB or more is a mapping of its own: resident is what is in use
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ganglion.decide.shapes import GPTShape
from ganglion.execute.models import build_model, cross_entropy

_KIB = 1024
_NO_BACKWARD = -1
# Options and values of mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
_ALWAYS_FROM_HEAP = 2**30
_LARGE = 2**17
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


class SavedBytes:
    """The memory that autograd keeps now, each piece once, and the most it kept.

    `live_peak` is of forwards, `again_peak` of what was computed again in a backward.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Count nothing yet; `known` tensors, such as weights, are counted elsewhere."""
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._pieces: dict[int, _Piece] = {}
        self._now = {True: 0, False: 0}
        self.live_peak = self.again_peak = 0
        self.is_on = True

    @property
    def num_bytes(self) -> int:
        """What is kept now."""
        return sum(self._now.values())

    def watching(self) -> AbstractContextManager[object]:
        """Return the context in which a training step is counted."""
        if not self.is_on:
            return nullcontext()
        return saved_tensors_hooks(self._pack, lambda holder: holder.tensor)

    def _pack(self, tensor: Tensor) -> _Holder:
        return _Holder(self, tensor, torch._C._current_graph_task_id() != _NO_BACKWARD)

    def add(self, place: int, num_bytes: int, *, is_again: bool) -> None:
        """Note that one more holder has a piece of memory."""
        if place in self._known:
            return
        piece = self._pieces.setdefault(place, _Piece(num_bytes, is_again))
        piece.num_holders += 1
        if piece.num_holders == 1:
            self._now[is_again] += num_bytes
            self.live_peak = max(self.live_peak, self._now[False])
            self.again_peak = max(self.again_peak, self._now[True])

    def remove(self, place: int) -> None:
        """Note that a holder is gone."""
        if place in self._known:
            return
        piece = self._pieces[place]
        piece.num_holders -= 1
        if piece.num_holders == 0:
            del self._pieces[place]
            self._now[piece.is_again] -= piece.num_bytes


@dataclass(slots=True)
class _Piece:
    """A piece of memory, and whether it was made while a backward ran."""

    num_bytes: int
    is_again: bool
    num_holders: int = 0


class _Holder:
    """One saved tensor."""

    __slots__ = ("_owner", "_place", "tensor")

    def __init__(self, owner: SavedBytes, tensor: Tensor, is_again: bool) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._owner, self._place = tensor, owner, storage.data_ptr()
        owner.add(self._place, storage.nbytes(), is_again=is_again)

    def __del__(self) -> None:
        self._owner.remove(self._place)


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
