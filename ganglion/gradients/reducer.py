"""The reducer: gradients accumulate in flat buckets, and each bucket is summed over the replicas.

A gradient is a view into its bucket's buffer, so accumulation and reduction share one piece of
memory and nothing is copied. During the last microbatch of a step the reducer is armed: autograd
tells it when each gradient is final, and a full bucket starts its all-reduce at once.

    backward   |  f  e | d  c | b  a |
    bucket 0           ~~~~~~~~            all-reduce of e, f while d..a are computed
    bucket 1                  ~~~~~~~~
    bucket 2                         ~~~~  only this one is exposed

The twin without overlap starts the same all-reduces in the same order after backward: the
arithmetic is the same, so the results are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ganglion.comm import Group, Handle
from ganglion.errors import ConfigError
from ganglion.schedules import Bucket, plan_buckets
from ganglion.trace import COMM, Recorder


class GradientReducer:
    """Owns the gradients of some parameters and sums them over one group."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        recorder: Recorder,
        *,
        bucket_bytes: int,
        overlap: bool,
    ) -> None:
        """Give each parameter a gradient inside a bucket of at most `bucket_bytes`."""
        self._group = group
        self._recorder = recorder
        self._overlap = overlap and group.size > 1
        self._parameters = [p for p in parameters.values() if p.requires_grad]
        self._buckets = self._plan(bucket_bytes)
        self.buffers = [self._allocate(bucket) for bucket in self._buckets]
        self._bucket_of = {
            id(self._parameters[member]): number
            for number, bucket in enumerate(self._buckets)
            for member in bucket.members
        }
        self._views = {id(p): p.grad for p in self._parameters}
        self._names = {id(p): name for name, p in parameters.items()}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for p in self._parameters
        ]
        self._armed = False
        self._missing: list[int] = []
        self._final: set[int] = set()
        self._started: list[tuple[Handle, float]] = []

    def zero(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        for buffer in self.buffers:
            buffer.zero_()
        for parameter in self._parameters:
            parameter.grad = self._views[id(parameter)]

    def arm(self) -> None:
        """Say that the next backward is the last one of the step."""
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._final.clear()
        self._armed = True

    def finish(self, step: int) -> None:
        """Return when every bucket holds the sum over the group."""
        self._armed = False
        # Parameters that took no part leave their buckets incomplete: they hold zeros, reduce too.
        while len(self._started) < len(self._buckets):
            self._start_next()
        for (handle, start_s), buffer in zip(self._started, self.buffers, strict=True):
            handle.wait()
            self._recorder.add(
                COMM,
                "reduce",
                start_s,
                self._end_s(handle, start_s),
                step=step,
                axis="data",
                num_bytes=buffer.numel() * buffer.element_size(),
            )
        self._started.clear()

    def close(self) -> None:
        """Detach from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _ready(self, parameter: Tensor) -> None:
        if parameter.grad is not self._views[id(parameter)]:
            raise ConfigError(
                "a gradient was replaced during the step (zero_grad(set_to_none=True) or "
                "p.grad = ...): leave gradients to the run, it zeroes them before each step"
            )
        if not (self._armed and self._overlap):
            return
        self._count_final(parameter)
        # One fixed order on all ranks, whatever order autograd finishes in: collectives must match.
        while self._is_next_complete():
            self._start_next()

    def _count_final(self, parameter: Tensor) -> None:
        if id(parameter) in self._final:
            raise ConfigError(
                f"the gradient of {self._names[id(parameter)]!r} became final twice in one "
                f"backward, as in two segments of checkpoint(use_reentrant=True), so it cannot be "
                f"reduced while backward runs: use checkpoint(..., use_reentrant=False)"
            )
        self._final.add(id(parameter))
        self._missing[self._bucket_of[id(parameter)]] -= 1

    def _is_next_complete(self) -> bool:
        number = len(self._started)
        return number < len(self._buckets) and self._missing[number] == 0

    def _start_next(self) -> None:
        buffer = self.buffers[len(self._started)]
        start_s = self._recorder.clock()
        self._started.append((self._group.all_reduce(buffer), start_s))

    def _end_s(self, handle: Handle, start_s: float) -> float:
        """Return when a reduction was over, which may be long before somebody waited for it."""
        now_s, finished_s = self._recorder.clock(), handle.finished_s
        # A recorder may run on another clock than the handle: such a time would lie outside.
        if finished_s is not None and start_s <= finished_s <= now_s:
            return finished_s
        return now_s

    def _plan(self, bucket_bytes: int) -> list[Bucket]:
        """Bucket each dtype apart, for a buffer has one; buckets keep the order of backward."""
        dtypes = dict.fromkeys(p.dtype for p in self._parameters)
        return [bucket for dtype in dtypes for bucket in self._plan_dtype(dtype, bucket_bytes)]

    def _plan_dtype(self, dtype: torch.dtype, bucket_bytes: int) -> list[Bucket]:
        members = [i for i, p in enumerate(self._parameters) if p.dtype == dtype]
        sizes = [self._parameters[i].numel() for i in members]
        bound = max(1, bucket_bytes // dtype.itemsize)
        buckets = plan_buckets(sizes, bound, last_max_elements=max(1, bound // 8))
        return [
            Bucket(tuple(members[i] for i in bucket.members), bucket.offsets, bucket.num_elements)
            for bucket in buckets
        ]

    def _empty(self, num_elements: int, like: Tensor) -> Tensor:
        """Return memory for a bucket; on the host, such that the group need not copy it."""
        if like.device.type == "cpu":
            return self._group.allocate(num_elements, like.dtype)
        return torch.empty(num_elements, dtype=like.dtype, device=like.device)

    def _allocate(self, bucket: Bucket) -> Tensor:
        first = self._parameters[bucket.members[0]]
        buffer = self._empty(bucket.num_elements, first).zero_()
        for member, offset in zip(bucket.members, bucket.offsets, strict=True):
            parameter = self._parameters[member]
            view = buffer[offset : offset + parameter.numel()].view_as(parameter)
            parameter.grad = view
        return buffer
