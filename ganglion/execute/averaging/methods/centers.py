"""Where the centre lives, and what travels in one exchange.

| centre     | travels                          | moved by                          |
|------------|----------------------------------|-----------------------------------|
| replicated | sum of w to all                  | every worker, the same way        |
| delta      | sum of w - c to all              | every worker, the same way        |
| root       | c to all, sum of w to the root   | the root, which is a worker too   |

All three compute c' = c + alpha * sum(w - c) and the force alpha * (w - c) with the old c. A centre
has two vectors, c and one in transfer. They change places in an exchange: the new centre is made in
the memory of the sum, and the force in the memory of the old centre.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from ganglion.execute.averaging.methods.method import elastic_force
from ganglion.execute.averaging.methods.metrics import distance
from ganglion.execute.averaging.methods.sums import Bounds, Meter, Sum, allocate
from ganglion.execute.comm import Group, Handle


class Center(Protocol):
    """The centre as one worker sees it."""

    flat: Tensor
    sums: Sum | None
    lag: int  # exchanges that `flat` is behind the newest centre
    moved: Tensor | float  # how far the last exchange moved it, as far as is known here
    host_s: float | None  # spent on a centre in host memory; None if it is elsewhere

    def start(self, worker: Tensor) -> None:
        """Start an exchange of a copy of these weights."""

    def wait(self) -> None:
        """Return when all data of the exchange have arrived."""

    def before(self) -> Tensor | None:
        """Return the centre that the last started exchange is computed from, if it is here."""

    def tensors(self) -> list[Tensor]:
        """Return the centre and the buffers of its exchanges."""

    def apply(self, worker: Tensor, alpha: float, num_workers: int) -> Tensor:
        """Move the centre; return the force on this worker, valid until the next `start`."""


class ReplicatedCenter:
    """A copy of the centre on every worker, moved by the sum of all weights."""

    lag = 0

    def __init__(self, worker: Tensor, sums: Sum, group: Group) -> None:
        self.host_s: float | None = None
        self.moved: Tensor | float = 0.0
        self.flat = allocate(group, worker).copy_(worker)
        self.sums: Sum | None = sums
        self._sums = sums

    def start(self, worker: Tensor) -> None:
        """Start to sum the weights."""
        self._sums.buffer.copy_(worker)
        self._sums.start()

    def wait(self) -> None:
        """Return when the sum is complete."""
        self._sums.wait()

    def before(self) -> Tensor | None:
        """Return the centre itself, until `apply` moves it."""
        return self.flat

    def tensors(self) -> list[Tensor]:
        """Return the centre and the sum."""
        return [self.flat, *self._sums.tensors()]

    def apply(self, worker: Tensor, alpha: float, num_workers: int) -> Tensor:
        """Move the centre to (1 - P alpha) c + alpha * sum; return the force on this worker."""
        old, new = self.flat, self._sums.buffer
        self._move(new, old, alpha, num_workers)
        self.moved = distance(new, old)
        self.flat, self._sums.buffer = new, _force_in(old, worker, alpha)
        return self._sums.buffer

    def _move(self, total: Tensor, old: Tensor, alpha: float, num_workers: int) -> None:
        """Make the new centre in the memory of the sum."""
        total.mul_(alpha).add_(old, alpha=1.0 - num_workers * alpha)


class DeltaCenter(ReplicatedCenter):
    """A copy of the centre on every worker, moved by the sum of all differences from it.

    Differences are small enough to be compressed. All workers add the same sum.
    """

    def start(self, worker: Tensor) -> None:
        """Start to sum the differences."""
        torch.sub(worker, self.flat, out=self._sums.buffer)
        self._sums.start()

    def _move(self, total: Tensor, old: Tensor, alpha: float, num_workers: int) -> None:
        total.mul_(alpha).add_(old)


class RootCenter:
    """The centre at the first worker; the others have it as of the last exchange.

    With `on_host`, it lies in host memory and travels through it (version 1 of Sync EASGD).
    """

    def __init__(
        self, worker: Tensor, group: Group, bounds: Bounds, meter: Meter, *, on_host: bool = False
    ) -> None:
        device = torch.device("cpu") if on_host else worker.device
        like = worker.to(device)
        self.flat = allocate(group, like).copy_(like)
        self.sums: Sum | None = None
        self.lag = 0 if group.index == 0 else 1
        self.host_s: float | None = 0.0 if on_host else None
        self.moved: Tensor | float = 0.0
        self._travelling = allocate(group, like)
        # A broadcast that breaks off must not damage what may be the last copy of the centre.
        self._arriving = self.flat if group.index == 0 else allocate(group, like)
        self._has_arrived = False
        self._group, self._bounds, self._meter = group, bounds, meter
        self._handles: list[Handle] = []

    def start(self, worker: Tensor) -> None:
        """Start to broadcast the centre and to sum the weights at the root."""
        self._travelling.copy_(worker)
        self._has_arrived = False
        if self._group.index == 0:
            self._arriving = self.flat
        for begin, end in self._bounds:
            self._handles.append(self._group.broadcast(self._arriving[begin:end], 0))
            self._handles.append(self._group.reduce(self._travelling[begin:end], 0))
        self._meter.sent_bytes += self._travelling.nbytes

    def wait(self) -> None:
        """Return when the centre has arrived, and at the root the sum."""
        handles, self._handles = self._handles, []
        self._meter.wait(handles)
        self._has_arrived = True

    def before(self) -> Tensor | None:
        """Return the centre that was broadcast, if all of it has arrived."""
        return self._arriving if self._has_arrived else None

    def tensors(self) -> list[Tensor]:
        """Return the known centre, the one that arrives, and the weights in transfer."""
        return [self.flat, self._arriving, self._travelling]

    def apply(self, worker: Tensor, alpha: float, num_workers: int) -> Tensor:
        """Move the centre at the root; return the force on this worker."""
        worker = worker.to(self.flat.device)
        if self._group.index != 0:
            self.moved = distance(self._arriving, self.flat)
            self.flat, self._arriving = self._arriving, self.flat
            return elastic_force(worker, self.flat, alpha, out=self._travelling)
        start_s = time.perf_counter()
        old, new = self.flat, self._travelling
        new.mul_(alpha).add_(old, alpha=1.0 - num_workers * alpha)
        self.moved = distance(new, old)
        self.flat, self._travelling = new, _force_in(old, worker, alpha)
        if self.host_s is not None:
            self.host_s += time.perf_counter() - start_s
        return self._travelling


def _force_in(old_center: Tensor, worker: Tensor, alpha: float) -> Tensor:
    """Return the force on a worker, made in the memory of the old centre."""
    return torch.sub(worker, old_center, out=old_center).mul_(alpha)
