"""The sum of one vector over all workers.

    total.buffer.copy_(mine)     total.start()     ...compute...     total.wait()

The buffer belongs to the collective between `start` and `wait`; then it holds the sum, the same
bits on every worker. A Meter adds up bytes and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ganglion.execute.averaging.methods.metrics import ExchangeMetrics
from ganglion.execute.comm import Group, Handle, empty_for

Bounds = Sequence[tuple[int, int]]


class Meter:
    """Bytes and seconds of the collectives of one worker."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.wait_s = 0.0
        self.comm_s = 0.0

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait for handles in order, and count how long that took and how long they ran."""
        start_s = time.perf_counter()
        for handle in handles:
            handle.wait()
        now_s = time.perf_counter()
        self.wait_s += now_s - start_s
        begun = [h.started_s for h in handles if h.started_s is not None]
        if begun:
            ends = [now_s if h.finished_s is None else h.finished_s for h in handles]
            self.comm_s += max(0.0, max(ends) - min(begun))

    def metrics(self) -> ExchangeMetrics:
        """Return metrics with the measured values and defaults for all others."""
        return ExchangeMetrics(
            sent_bytes=self.sent_bytes,
            wait_s=self.wait_s,
            comm_s=self.comm_s,
            exposed_s=min(self.wait_s, self.comm_s),
        )


class Sum(Protocol):
    """A vector that is summed over all workers repeatedly."""

    buffer: Tensor

    def start(self) -> None:
        """Start to sum the buffer."""

    def wait(self) -> Tensor:
        """Return the buffer when it holds the sum; raise CommError if the sum failed."""

    def discard(self) -> None:
        """Discard the last sum, which no worker uses."""

    def tensors(self) -> list[Tensor]:
        """Return the memory of the sum."""

    def state(self) -> dict[str, Tensor]:
        """Return copies of the state that a resume needs."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the result of `state`."""


class GroupSum:
    """Sums by the all-reduce of a group, in one message or in parts."""

    def __init__(self, group: Group, like: Tensor, bounds: Bounds, meter: Meter) -> None:
        """Sum vectors like `like`, one message for each (begin, end) of `bounds`."""
        self.buffer = allocate(group, like)
        self._group = group
        self._bounds = bounds
        self._meter = meter
        self._handles: list[Handle] = []

    def start(self) -> None:
        """Start to sum the buffer."""
        parts = [self.buffer[begin:end] for begin, end in self._bounds]
        self._handles = [self._group.all_reduce(part) for part in parts]
        self._meter.sent_bytes += self.buffer.nbytes

    def wait(self) -> Tensor:
        """Return the buffer when it holds the sum."""
        self._meter.wait(self._handles)
        self._handles = []
        return self.buffer

    def discard(self) -> None:
        """Do nothing: a sum leaves no state."""

    def tensors(self) -> list[Tensor]:
        """Return the buffer."""
        return [self.buffer]

    def state(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Do nothing."""


class Votes:
    """The votes of all workers on an exchange, which travel beside the data."""

    def __init__(self, group: Group, like: Tensor, meter: Meter) -> None:
        self._group = group
        self._votes = torch.zeros(group.size, dtype=like.dtype, device=like.device)
        self._meter = meter
        self._handle: Handle | None = None

    def start(self, worker: Tensor) -> None:
        """Vote for an exchange of `worker` weights if all of them are finite."""
        self._votes.zero_()
        # Stays on the device, without a synchronization.
        self._votes[self._group.index] = torch.isfinite(worker.sum()).to(self._votes.dtype)
        self._handle = self._group.all_reduce(self._votes)
        self._meter.sent_bytes += self._votes.nbytes

    def wait(self) -> dict[int, bool]:
        """Return the vote of each member, by rank."""
        assert self._handle is not None, "start comes first"
        self._meter.wait([self._handle])
        self._handle = None
        return dict(zip(self._group.ranks, (v == 1.0 for v in self._votes.tolist()), strict=True))


def allocate(group: Group, like: Tensor) -> Tensor:
    """Return zeros like `like`, in memory that the group can use without a copy if possible."""
    return empty_for(group, like.numel(), like).zero_()
