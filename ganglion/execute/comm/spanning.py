"""Groups that span hosts: shared memory inside a host, torch.distributed between hosts.

    host A   0 --+-- 1            1. combine inside every host (shared memory)
                 |                2. combine between the hosts (one rank of each, over the network)
    host B   2 --+-- 3            3. broadcast the result inside every host

One copy of the data leaves a host, however many ranks it has. A thread of the group does the steps,
so that a collective makes progress while the caller computes; each step has a fixed order, so
results repeat bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ganglion.execute.comm.background import Background, Work
from ganglion.execute.comm.collectives import SUM, BaseGroup, Group, Handle


class SpanningGroup(BaseGroup):
    """A group of ranks on several hosts."""

    def __init__(
        self, rank: int, parts: list[tuple[int, ...]], inside: Group, between: Group | None
    ) -> None:
        """Join the members on this host (`inside`) with the first member of every host.

        `parts` has the members host by host; `between` is None on all but those first members.
        """
        super().__init__(tuple(sorted(member for part in parts for member in part)), rank)
        self._parts = parts
        self._inside = inside
        self._between = between
        self._background = Background(f"collectives of {rank} over {len(parts)} hosts")

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor that need not be copied inside the host."""
        return self._inside.allocate(num_elements, dtype)

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        return self._start(lambda: self._all_reduce(tensor, op))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        return self._start(lambda: self._all_gather(output, tensor))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""

        def work() -> None:
            whole = tensor.detach().clone()
            self._all_reduce(whole, op)
            output.detach().view(-1).copy_(whole.view(-1).chunk(self.size)[self.index])

        return self._start(work)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        return self._start(lambda: self._broadcast(tensor, root))

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`."""

        def work() -> None:
            total = tensor if self.index == root else tensor.detach().clone()
            self._all_reduce(total, op)

        return self._start(work)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        self.all_reduce(torch.zeros(1)).wait()

    def close(self) -> None:
        """Release what the group holds; it cannot be used afterwards."""
        self._background.close()
        self._leave()

    def _start(self, work: Work) -> Handle:
        def closing_on_failure() -> None:
            try:
                work()
            except BaseException:
                # Ranks of other hosts wait for this one: a closed connection ends their waits.
                self._leave()
                raise

        return self._background.start(closing_on_failure)

    def _leave(self) -> None:
        between, self._between = self._between, None
        if between is not None:
            between.close()
        self._inside.close()

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        self._inside.reduce(tensor, 0, op).wait()
        if self._between is not None:
            self._between.all_reduce(tensor, op).wait()
        self._inside.broadcast(tensor, 0).wait()

    def _all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Sum zeroed wholes that each hold one member's part, as bytes, which no sum can round."""
        whole = torch.zeros_like(output.detach())
        whole.view(-1).chunk(self.size)[self.index].copy_(tensor.detach().view(-1))
        self._all_reduce(whole.view(-1).view(torch.uint8), SUM)
        output.detach().copy_(whole)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        owner = self.ranks[root]
        home = next(at for at, part in enumerate(self._parts) if owner in part)
        mine = self.ranks[self.index] in self._parts[home]
        if mine:
            self._inside.broadcast(tensor, self._parts[home].index(owner)).wait()
        if self._between is not None:
            self._between.broadcast(tensor, home).wait()
        if not mine:
            self._inside.broadcast(tensor, 0).wait()
