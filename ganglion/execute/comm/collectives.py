"""The collectives of every group, over any carrier.

A collective is started and returns a handle; the caller may touch the data again after `wait()`:

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
        """When work on it began, or None if it has not yet."""

    @property
    def finished_s(self) -> float | None:
        """When it was done, or None if it is not or the time is not known."""

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""

    def wait(self) -> None:
        """Return when the result is in place; raise CommError if it will never be."""


class Group(Protocol):
    """Ranks that exchange data; every member must call the same collectives in the same order."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the world, ascending."""

    @property
    def index(self) -> int:
        """This rank's position among the members."""

    @property
    def size(self) -> int:
        """The number of members."""

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
        """Return uninitialized host memory that all members see, or None if there is none.

        All members must call this, and all get the memory or none does. Callers order reads after
        writes with barriers.
        """

    def close(self) -> None:
        """Release what the group holds; it cannot be used afterwards."""


def empty_for(group: Group, num_elements: int, like: Tensor) -> Tensor:
    """Return flat memory of the dtype and device of `like`, from `group.allocate` on the host."""
    if like.device.type == "cpu":
        return group.allocate(num_elements, like.dtype)
    return torch.empty(num_elements, dtype=like.dtype, device=like.device)


class DoneHandle:
    """The handle of a collective that had nothing to wait for."""

    finished_s: float | None = None

    def __init__(self) -> None:
        self.started_s = time.perf_counter()

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class BaseGroup:
    """The members of a group, and ordinary memory: the defaults of most carriers."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.size = len(ranks)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an ordinary tensor."""
        return torch.empty(num_elements, dtype=dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return None: members may be on different hosts."""
        return None

    def close(self) -> None:
        """Do nothing: the group holds nothing."""


class SoloGroup(BaseGroup):
    """A group of one: each collective is the identity."""

    def __init__(self, rank: int) -> None:
        super().__init__((rank,), rank)

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Leave the tensor as it is."""
        return DoneHandle()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Copy the only part."""
        output.copy_(tensor)
        return DoneHandle()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Copy the only part."""
        output.copy_(tensor)
        return DoneHandle()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Leave the tensor as it is."""
        return DoneHandle()

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Leave the tensor as it is."""
        return DoneHandle()

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return an ordinary tensor."""
        return torch.empty(num_elements, dtype=dtype)

    def barrier(self) -> None:
        """Return at once."""
