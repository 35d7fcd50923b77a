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
    """The growth of this process's memory since the watch was created."""

    def __init__(self, device: torch.device) -> None:
        """Measure the baseline; create the watch before the model."""
        _warm_up(device)
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.baseline_bytes = int(torch.cuda.memory_allocated(device))
        else:
            self.baseline_bytes = _status("VmRSS")

    def peak_bytes(self) -> int:
        """Return the peak so far above the baseline, on a CPU with all shared pages."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self.baseline_bytes
        return _status("VmHWM") - self.baseline_bytes

    def foreign_bytes(self) -> int:
        """Return the bytes of shared pages, of messages and buckets, that count for other ranks.

        The kernel walks all pages for it: call it once.
        """
        return 0 if self._device.type == "cuda" else _counted_elsewhere()


def held_bytes(tensors: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Return the bytes of tensors by category; each storage counts once, where it comes first."""
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
    """Train a tiny model, so that torch loads what every training needs, about 30 MB."""
    model = build_model(_TINY).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(2, _TINY.seq_len, dtype=torch.long, device=device)
    for _ in range(2):  # gradients are made once and added to later
        cross_entropy(model(ids), ids).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _status(key: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    if not sys.platform.startswith("linux"):  # no current size there, so no baseline
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
    """The memory that autograd keeps for backward, each storage once, and its peaks.

    Each saved tensor is put into a holder that is freed with its node of the graph. `live_peak` is
    of forwards, `again_peak` of tensors saved during a backward: the inside of recomputed blocks.
    Counting costs a call for each saved tensor: it is for the first steps of a run.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Leave out `known` tensors, such as weights."""
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._storages: dict[int, _Storage] = {}
        self._now = {True: 0, False: 0}
        self.live_peak = self.again_peak = 0
        self.is_on = True

    @property
    def num_bytes(self) -> int:
        """The bytes kept now."""
        return sum(self._now.values())

    def watching(self) -> AbstractContextManager[object]:
        """Return the context in which a training step is counted."""
        if not self.is_on:
            return nullcontext()
        return saved_tensors_hooks(self._pack, lambda holder: holder.tensor)

    def _pack(self, tensor: Tensor) -> _Holder:
        return _Holder(self, tensor, torch._C._current_graph_task_id() != _NO_BACKWARD)

    def add(self, address: int, num_bytes: int, *, is_again: bool) -> None:
        """Count one more holder of a storage."""
        if address in self._known:
            return
        held = self._storages.setdefault(address, _Storage(num_bytes, is_again))
        held.num_holders += 1
        if held.num_holders == 1:
            self._now[is_again] += num_bytes
            self.live_peak = max(self.live_peak, self._now[False])
            self.again_peak = max(self.again_peak, self._now[True])

    def remove(self, address: int) -> None:
        """Count one holder less of a storage."""
        if address in self._known:
            return
        held = self._storages[address]
        held.num_holders -= 1
        if held.num_holders == 0:
            del self._storages[address]
            self._now[held.is_again] -= held.num_bytes


@dataclass(slots=True)
class _Storage:
    """A storage, and whether it was saved during a backward."""

    num_bytes: int
    is_again: bool
    num_holders: int = 0


class _Holder:
    """One saved tensor."""

    __slots__ = ("_address", "_owner", "tensor")

    def __init__(self, owner: SavedBytes, tensor: Tensor, is_again: bool) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._owner, self._address = tensor, owner, storage.data_ptr()
        owner.add(self._address, storage.nbytes(), is_again=is_again)

    def __del__(self) -> None:
        self._owner.remove(self._address)


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory; return whether it can."""
    return _set_option(_M_MMAP_THRESHOLD, _ALWAYS_FROM_HEAP) and _set_option(
        _M_TRIM_THRESHOLD, _NEVER
    )


def return_large_blocks() -> bool:
    """Make the C library return large freed blocks to the kernel; return whether it can.

    For runs short of memory rather than of time. Aligned blocks of equal size do not fit where the
    one before was, so a heap that keeps them grows beyond what is ever in use.
    """
    return _set_option(_M_MMAP_THRESHOLD, _LARGE) and _set_option(_M_TRIM_THRESHOLD, _LARGE)


def _set_option(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Other C libraries have no mallopt.
    return mallopt is not None and bool(mallopt(option, value))
