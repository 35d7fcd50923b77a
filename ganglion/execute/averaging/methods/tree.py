"""Collectives along binomial trees over any transport, as in the paper, in one fixed order.

For four workers and root 0, a reduce goes up and a broadcast down:

    0 <-- 1     2 <-- 3        (w0 + w1), (w2 + w3)
    0 <-------- 2              (w0 + w1) + (w2 + w3)

That is ceil(log2 P) messages deep; one worker after the other would be P. The order of arrival does
not matter, so equal inputs give equal bits on every carrier and in every run. A thread owns the
transport and does the work: collectives continue while the caller computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ganglion.errors import ProtocolError
from ganglion.execute.comm import SUM, Background, Handle, Transport, combine_two, tree_pairs

_UP, _DOWN = "tree_up", "tree_down"


class TreeGroup:
    """A group whose collectives are messages along trees."""

    def __init__(
        self, open_transport: Callable[[], Transport], ranks: tuple[int, ...], timeout_s: float
    ) -> None:
        """Join `ranks` over a transport of its own; no message may take longer than `timeout_s`."""
        self._thread = Background("the tree of workers")
        self._opened: list[Transport] = []
        # In this thread too, so that all ranks open transports in one order.
        self._thread.start(lambda: self._opened.append(open_transport())).wait()
        self._transport = self._opened[0]
        self._timeout_s = timeout_s
        self._number = 0
        self._early: dict[tuple[int, int, str], Tensor] = {}
        self.ranks, self.size = ranks, len(ranks)
        self.index = ranks.index(self._transport.rank)

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` at member 0, then copy it to all."""
        return self._start(lambda number: self._up_and_down(tensor, op, number))

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` at `root`; the others keep their values."""
        return self._start(lambda n: self._up(tensor, root, op, n))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others."""
        return self._start(lambda n: self._down(tensor, root, n))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Copy every member's part to all, one tree each."""
        parts = output.view(self.size, -1)
        parts[self.index].copy_(tensor.reshape(-1))
        handle = None
        for root in range(self.size):
            handle = self.broadcast(parts[root], root)
        assert handle is not None, "a group has a member"
        return handle

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine at member 0, copy to all, keep this member's part."""

        def work(number: int) -> None:
            total = tensor.clone()
            self._up_and_down(total, op, number)
            output.view(-1).copy_(total.view(-1).chunk(self.size)[self.index])

        return self._start(work)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        self.all_reduce(torch.zeros(1)).wait()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an ordinary tensor: messages are always copied."""
        return torch.empty(num_elements, dtype=dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return None: members only send messages."""
        return None

    def close(self) -> None:
        """Finish started collectives and close the transport."""
        self._thread.start(self._transport.close)
        self._thread.close()

    # --- parts ---------------------------------------------------------------------------------

    def _start(self, work: Callable[[int], None]) -> Handle:
        number, self._number = self._number, self._number + 1
        return self._thread.start(lambda: work(number))

    def _up_and_down(self, tensor: Tensor, op: str, number: int) -> None:
        self._up(tensor, 0, op, number)
        self._down(tensor, 0, number)

    def _up(self, tensor: Tensor, root: int, op: str, number: int) -> None:
        held = tensor.detach()
        for into, source in tree_pairs(self.size, root):
            if self.index == into:
                held = combine_two(held, self._receive(source, _UP, held, number), op)
            elif self.index == source:
                self._transport.post(self.ranks[into], _UP, held, step=number)
        if self.index == root:
            tensor.copy_(held)

    def _down(self, tensor: Tensor, root: int, number: int) -> None:
        for into, source in reversed([*tree_pairs(self.size, root)]):
            if self.index == into:
                self._transport.post(self.ranks[source], _DOWN, tensor, step=number)
            elif self.index == source:
                tensor.copy_(self._receive(into, _DOWN, tensor, number))

    def _receive(self, member: int, kind: str, like: Tensor, number: int) -> Tensor:
        """Return the message of a member for collective `number`; keep messages that come early."""
        key = (self.ranks[member], number, kind)
        while key not in self._early:
            awaiting = f"{kind} {number} of rank {key[0]}"
            arrival = self._transport.receive(self._timeout_s, awaiting)
            found = (arrival.source, arrival.header.step, arrival.header.kind)
            self._early[found] = arrival.tensor
        tensor = self._early.pop(key)
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ProtocolError(
                f"rank {key[0]} sent {tensor.dtype} {tuple(tensor.shape)} to collective {number}, "
                f"where {like.dtype} {tuple(like.shape)} was due: all workers need the same model"
            )
        return tensor.to(like.device)
