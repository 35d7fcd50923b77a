"""Groups that record each collective as one event on lane comm, from its start to its end.

The first `wait()` writes the event, because the end is known then; an event costs a microsecond, a
collective at least twenty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ganglion.execute.comm.collectives import SUM, Group, Handle
from ganglion.trace import COMM, Recorder


class TracedHandle:
    """A started collective that is recorded when it has ended."""

    def __init__(self, inner: Handle, group: TracedGroup, kind: str, num_bytes: int) -> None:
        self._inner = inner
        self._group = group
        self._kind = kind
        self._num_bytes = num_bytes
        self._start_s: float | None = group.trace.clock()

    @property
    def started_s(self) -> float | None:
        """When work on it began."""
        return self._inner.started_s

    @property
    def finished_s(self) -> float | None:
        """When it was done."""
        return self._inner.finished_s

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._inner.is_done()

    def wait(self) -> None:
        """Return when the result is in place."""
        self._inner.wait()
        if self._start_s is not None:
            self._group.record(self._kind, self._start_s, self._inner.finished_s, self._num_bytes)
            self._start_s = None


class TracedGroup:
    """A group whose collectives are recorded; `plain` is the group itself."""

    def __init__(
        self, plain: Group, axes: tuple[str, ...], trace: Recorder, label: str = ""
    ) -> None:
        """Record the collectives of `plain`, which lies along `axes`, in `trace`.

        A `label` is put before the kind of each event: `norm_all_reduce`.
        """
        self.plain = plain
        self._axes = axes
        self._prefix = f"{label}_" if label else ""
        self.trace = trace
        self.ranks = plain.ranks
        self.index = plain.index
        self.size = plain.size
        self._axis = "+".join(axes)

    def labelled(self, label: str) -> TracedGroup:
        """Return the same group with a label on its events."""
        return TracedGroup(self.plain, self._axes, self.trace, label)

    def all_reduce(self, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members, in place."""
        return TracedHandle(self.plain.all_reduce(tensor, op), self, "all_reduce", tensor.nbytes)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Concatenate every member's `tensor` along dim 0 into `output`."""
        inner = self.plain.all_gather(output, tensor)
        return TracedHandle(inner, self, "all_gather", output.nbytes)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = SUM) -> Handle:
        """Combine `tensor` over all members and keep this member's equal part of dim 0."""
        inner = self.plain.reduce_scatter(output, tensor, op)
        return TracedHandle(inner, self, "reduce_scatter", tensor.nbytes)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Copy the tensor of the member at position `root` to all others, in place."""
        return TracedHandle(self.plain.broadcast(tensor, root), self, "broadcast", tensor.nbytes)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = SUM) -> Handle:
        """Combine `tensor` over all members into that of the member at position `root`."""
        inner = self.plain.reduce(tensor, root, op)
        return TracedHandle(inner, self, "reduce_to_one", tensor.nbytes)

    def barrier(self) -> None:
        """Return when every member has arrived."""
        start_s = self.trace.clock()
        self.plain.barrier()
        self.record("barrier", start_s, None, 0)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized host tensor that this group's collectives need not copy."""
        return self.plain.allocate(num_elements, dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory that all members see, if there is any."""
        return self.plain.allocate_common(num_elements, dtype)

    def close(self) -> None:
        """Release what the group holds; it cannot be used afterwards."""
        self.plain.close()

    def record(self, kind: str, start_s: float, finished_s: float | None, num_bytes: int) -> None:
        """Write one event; without an end, or with one on another clock, it ends now."""
        now_s = self.trace.clock()
        known = finished_s is not None and start_s <= finished_s <= now_s
        end_s = finished_s if known and finished_s is not None else now_s
        self.trace.add(
            COMM,
            self._prefix + kind,
            start_s,
            end_s,
            step=self.trace.step,
            axis=self._axis,
            num_bytes=num_bytes,
        )


def labelled(group: Group, label: str) -> Group:
    """Return the group with a label on its events, if they are recorded."""
    return group.labelled(label) if isinstance(group, TracedGroup) else group


def plain_group(group: Group) -> Group:
    """Return the group without its trace, for callers that record its collectives themselves."""
    return group.plain if isinstance(group, TracedGroup) else group
