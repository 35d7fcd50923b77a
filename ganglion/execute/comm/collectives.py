"""The collectives every group offers, whatever carries them.

A collective is started and returns a handle; the data may be touched again only after `wait()`.
The same calls work over torch.distributed, between threads of one process, and alone:

    handle = group.all_reduce(buffer)      # started, makes progress by itself
    ...                                    # compute something else
    handle.wait()                          # buffer now holds the sum
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

SUM = "sum"
MAX = "max"


class Handle(Protocol):
    """A started collective; its times are those of time.perf_counter."""

    @property
    def started_s(self) -> float | None:
        """When work on it began; None if it has not yet."""

    @property
    def finished_s(self) -> float | None:
        """When it was done; None if it is not, or nobody could see it."""

    def is_done(self) -> bool:
        """Say, without waiting, whether `wait` would return or raise at once."""

    def wait(self) -> None:
        """Return when the result is in place; raise CommError if it will never be."""


class Group(Protocol):
    """Some ranks that exchange data; every member must call the same collectives in order."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the world, ascending."""

    @property
    def index(self) -> int:
        """This rank's position among the members."""

    @property
    def size(self) -> int:
        """How many members there are."""

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`.

        The order is fixed: inside a host that of a binomial tree. The others keep their values.
        """

    def barrier(self) -> None:
        """Return when every member has arrived."""

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized host tensor that this group's collectives need not copy."""

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return uninitialized host memory that all members see, or None where there is none.

        All members must call it, and all get it or none does. What one writes others read; when
        they may is for the caller to say, with barriers.
        """

    def close(self) -> None:
        """Release what the group holds; it cannot be used afterwards."""


def empty_for(group: Group, num_elements: int, like: Tensor) -> Tensor:
    """Return flat memory like `like`; on the host, such that the group need not copy it."""
    if like.device.type == "cpu":
        return group.allocate(num_elements, like.dtype)
    return torch.empty(num_elements, dtype=like.dtype, device=like.device)


class Done:
    """The handle of a collective that had nothing to wait for."""

    finished_s: float | None = None

    def __init__(self) -> None:
        """Begin and end now."""
        self.started_s = time.perf_counter()

    def is_done(self) -> bool:
        """Say yes."""
        return True

    def wait(self) -> None:
        """Return at once."""


class SoloGroup:
    """A group of one: each collective is the identity."""

    def __init__(self, rank: int) -> None:
        """Make the group that holds only `rank`."""
        self.ranks = (rank,)
        self.index = 0
        self.size = 1

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Leave the tensor as it is."""
        return Done()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Copy the only part."""
        output.copy_(tensor)
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Copy the only part."""
        output.copy_(tensor)
        return Done()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Leave the tensor as it is."""
        return Done()

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Leave the tensor as it is."""
        return Done()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an ordinary tensor."""
        return torch.empty(num_elements, dtype=dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return an ordinary tensor."""
        return torch.empty(num_elements, dtype=dtype)

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Hold nothing, release nothing."""
