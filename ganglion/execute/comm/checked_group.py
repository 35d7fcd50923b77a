"""The base of groups that compare their members' calls and take sums in order of rank themselves.

Shared memory and MPI carry such groups. The base checks arguments, and combines small collectives
whose data came with the calls.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ganglion.errors import CommError, ProtocolError
from ganglion.execute.comm.calls import DTYPES, OPS, Call
from ganglion.execute.comm.collectives import MAX, SUM, BaseGroup, Handle
from ganglion.execute.comm.reduce_order import combine, combine_aliased, combine_by_tree

Data = TypeVar("Data", bytes, memoryview)
_CARRIED = frozenset(DTYPES)


class GroupFailure:
    """The first failure of a group on any path, which every later call raises."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[CommError], None]] = []
        self._lock = threading.Lock()
        self._error: CommError | None = None

    def on_failure(self, callback: Callable[[CommError], None]) -> None:
        """Call `callback` at the first failure, to notify the other members."""
        self._callbacks.append(callback)

    def fail(self, error: CommError) -> CommError:
        """Record `error` and notify the others, unless there was one before; return the first."""
        if self.record(error):
            for callback in self._callbacks:
                callback(error)
        return self.error() or error

    def record(self, error: CommError) -> bool:
        """Record `error` without notifying the others; return False if there was one before."""
        with self._lock:
            first = self._error is None
            self._error = self._error or error
            return first

    def error(self) -> CommError | None:
        """Return a fresh copy of the recorded error, if any."""
        error = self._error
        return None if error is None else type(error)(str(error))

    def check(self) -> None:
        """Raise the recorded error, if any."""
        error = self.error()
        if error is not None:
            raise error


class CheckedGroup(BaseGroup, ABC):
    """A group whose members compare their calls; see Group.

    Calls of one group must not come from two threads at once; waits may come in any order. Members
    that fail or disagree fail the whole group: every later call raises.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, carrier: str) -> None:
        """Join the members `ranks` as `rank`; `carrier` is named in errors."""
        super().__init__(ranks, rank)
        self._carrier = carrier
        self._failure = GroupFailure()

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        flat = self._flattened(tensor)
        return self._start(self._call("all_reduce", flat, op), flat, flat)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        flat, target = self._flattened(tensor), self._flattened(output)
        self._check_sizes("all_gather", target, flat)
        return self._start(self._call("all_gather", flat), flat, target)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        flat, target = self._flattened(tensor), self._flattened(output)
        self._check_sizes("reduce_scatter", flat, target)
        return self._start(self._call("reduce_scatter", flat, op), flat, target)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        flat = self._flattened(tensor)
        return self._start(self._call("broadcast", flat, root=root), flat, flat)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`.

        The order is that of a binomial tree; the tensors of the others keep their values.
        """
        flat = self._flattened(tensor)
        return self._start(self._call("reduce", flat, op, root), flat, flat)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._start(self._call("barrier", nothing), nothing, nothing).wait()

    @abstractmethod
    def _next_number(self) -> int:
        """Return the number of the next call."""

    @abstractmethod
    def _start(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        """Start a checked collective from the flat `source` into the flat `target`."""

    def _call(self, kind: str, flat: Tensor, op: str = "", root: int = 0) -> Call:
        """Check the options and return the call with the next number."""
        self._failure.check()
        if op not in OPS or not 0 <= root < self.size or (op and flat.dtype == torch.bool):
            raise ProtocolError(
                f"{kind} of ranks {list(self.ranks)} cannot have op {op!r}, root {root} and "
                f"{flat.dtype}: ops are {SUM!r} and {MAX!r}, not of bool, and roots are positions "
                f"0 to {self.size - 1}"
            )
        return Call(self._next_number(), kind, op, flat.dtype, root, flat.numel())

    def _flattened(self, tensor: Tensor) -> Tensor:
        """Return a flat view of a tensor; raise ProtocolError if it cannot be carried."""
        if not (tensor.is_cpu and tensor.dtype in _CARRIED and tensor.is_contiguous()):
            raise ProtocolError(
                f"{self._carrier} cannot carry a tensor of {tensor.dtype}, {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}, on {tensor.device}: give it a contiguous one on the "
                f"CPU with a common dtype"
            )
        flat = tensor.detach()
        return flat if flat.dim() == 1 else flat.view(-1)

    def _check_sizes(self, kind: str, whole: Tensor, part: Tensor) -> None:
        """Raise ProtocolError unless `whole` has one part for each member."""
        if whole.numel() != part.numel() * self.size or whole.dtype != part.dtype:
            raise ProtocolError(
                f"{kind} of ranks {list(self.ranks)} cannot join {part.numel()} {part.dtype} and "
                f"{whole.numel()} {whole.dtype}: the whole must be {self.size} times the part, of "
                f"one dtype"
            )

    def _piece(self, call: Call, data: Data, peer: int) -> Data:
        """Return what the member at position `peer` needs of this member's data."""
        if call.kind == "reduce_scatter":
            step = len(data) // self.size
            return data[peer * step : (peer + 1) * step]
        sends_nothing = call.kind == "broadcast" and self.index != call.root
        gets_nothing = call.kind == "reduce" and peer != call.root
        return data[:0] if sends_nothing or gets_nothing else data

    def _own_part(self, call: Call, source: Tensor) -> Tensor:
        """Return what this member itself needs of its data."""
        return source.view(self.size, -1)[self.index] if call.kind == "reduce_scatter" else source

    def _combine(self, call: Call, parts: list[Tensor], target: Tensor) -> None:
        """Put the result in place, from the pieces of all members in order of rank."""
        if call.kind == "all_reduce":
            combine_aliased(parts, self.index, call.op)
        elif call.kind == "all_gather":
            for place, part in zip(target.chunk(self.size), parts, strict=True):
                place.copy_(part)
        elif call.kind == "reduce_scatter":
            parts[self.index] = parts[self.index].clone()  # `output` may lie in `tensor`
            combine(parts, target, call.op)
        elif call.kind == "broadcast" and self.index != call.root:
            target.copy_(parts[call.root])
        elif call.kind == "reduce" and self.index == call.root:
            combine_by_tree(parts, call.root, target, call.op)
