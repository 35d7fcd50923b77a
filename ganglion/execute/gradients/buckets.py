"""Flat buffers of gradients, in one or more sets; their sums over groups, and their norm.

A gradient is a view into its bucket's buffer, so accumulation and reduction share one memory and
nothing is copied. One set is selected: backward adds to it. With two sets, a pipeline that never
flushes goes on with the next step while the last one is reduced:

    set 0   | bucket 0 | bucket 1 |    started: the all-reduces run, it must not be touched
    set 1   | bucket 0 | bucket 1 |    selected: every p.grad is a view into this one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ganglion.decide.schedules.buckets import Bucket, plan_buckets
from ganglion.errors import ConfigError
from ganglion.execute.comm import Group, Handle, empty_for
from ganglion.trace import COMM, Recorder

SQUARED_AT_ONCE = 2**16  # elements: 1 MiB of doubles, whatever the size of a buffer


class Reach(NamedTuple):
    """The group that a gradient is summed over, and how many ranks of a replica hold the sum."""

    group: Group
    num_copies: int = 1


class Reduction(NamedTuple):
    """A started all-reduce of one bucket; its start is on the recorder's clock."""

    handle: Handle
    start_s: float
    num_bytes: int


@dataclass(slots=True)
class _Set:
    buffers: list[Tensor] = field(default_factory=list)
    views: dict[int, Tensor] = field(default_factory=dict)  # by id of the parameter
    started: list[Reduction] = field(default_factory=list)
    step: int | None = None  # of the sums, once all buckets are started; None after a failure
    num_waited: int = 0


class GradientBuckets:
    """The gradients of some parameters in sets, each summed over its groups."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        reach: Reach | Mapping[str, Reach],
        recorder: Recorder,
        *,
        bucket_bytes: int,
        num_sets: int = 1,
    ) -> None:
        """Give each trainable parameter a gradient of zeros in every set, and select set 0.

        Attribute `parameters` has the trainable ones; `layout` lists which share a bucket, in the
        order of reduction. `reach` is one for all, or by name.
        """
        assert num_sets >= 1, "gradients need at least one set"
        self._recorder = recorder
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        self.parameters = list(trainable.values())
        reaches = [reach if isinstance(reach, Reach) else reach[name] for name in trainable]
        self.layout = _plan(self.parameters, reaches, bucket_bytes)
        self._reach = [reaches[bucket.members[0]] for bucket in self.layout]
        self._sets = [self._make_set() for _ in range(num_sets)]
        self.select(0)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._check)  # type: ignore[no-untyped-call]
            for p in self.parameters
        ]

    def buffers(self, which: int) -> list[Tensor]:
        """Return the flat buffer of each bucket of a set, in the order of reduction."""
        return self._sets[which].buffers

    def select(self, which: int) -> None:
        """Make every p.grad the view into a set, so that backward adds there."""
        self._selected = self._sets[which].views
        for parameter in self.parameters:
            parameter.grad = self._selected[id(parameter)]

    def zero(self, which: int) -> None:
        """Zero the gradients of a set, which must not be under reduction."""
        chosen = self._sets[which]
        is_under_way = chosen.step is not None and bool(chosen.started)
        assert not is_under_way, f"set {which} is still being reduced: wait for it first"
        chosen.step = None
        for buffer in chosen.buffers:
            buffer.zero_()

    def start(self, which: int, step: int) -> None:
        """Start the all-reduce of all buckets of a set that are not started yet, in order.

        The sums are those of update `step`. The set must not be touched until they are complete.
        """
        for number in range(len(self._sets[which].started), len(self.layout)):
            self.start_bucket(which, number)
        self._sets[which].step = step

    def start_bucket(self, which: int, number: int) -> None:
        """Start the all-reduce of the next bucket; `start` must follow."""
        chosen = self._sets[which]
        # One fixed order on all ranks: collectives must match.
        assert number == len(chosen.started), f"bucket {number} is not next, see started()"
        chosen.step = None
        start_s = self._recorder.clock()
        buffer = chosen.buffers[number]
        handle = self._reach[number].group.all_reduce(buffer)
        chosen.started.append(Reduction(handle, start_s, buffer.nbytes))

    def started(self, which: int) -> Sequence[Reduction]:
        """Return the reductions of a set that were started and not waited for."""
        return self._sets[which].started

    def is_done(self, which: int) -> bool:
        """Return whether a started set holds its sums, without blocking.

        True means that `wait` will not block; it must still be called, for failures and the trace.
        It stays True until the set is zeroed or started again.
        """
        chosen = self._sets[which]
        # The handle of a group of one is never done, for nothing was started.
        over = (
            self._reach[n].group.size == 1 or reduction.handle.is_done()
            for n, reduction in enumerate(chosen.started)
        )
        return chosen.step is not None and all(over)

    def square_norm(self, which: int) -> float:
        """Return this rank's part of the sum of squares; gradients on several ranks count once."""
        total = 0.0
        for buffer, reach in zip(self.buffers(which), self._reach, strict=True):
            total += sum_of_squares(buffer) / reach.num_copies
        return total

    def wait(self, which: int) -> None:
        """Return when all buckets of a started set hold the sum over the group; record each."""
        chosen = self._sets[which]
        assert chosen.step is not None, f"set {which} was not started, or failed"
        for number in range(chosen.num_waited, len(chosen.started)):
            self.wait_bucket(which, number)
        chosen.started.clear()
        chosen.num_waited = 0

    def wait_bucket(self, which: int, number: int) -> None:
        """Return when the next bucket of a started set holds its sum; `wait` must follow."""
        chosen = self._sets[which]
        assert chosen.step is not None, f"set {which} was not started, or failed"
        assert number == chosen.num_waited, f"bucket {number} is not next to wait for"
        step, chosen.step = chosen.step, None  # after a failure it never holds its sums
        chosen.started[number].handle.wait()
        reduction, end_s = chosen.started[number], self._end_s(chosen.started[number])
        self._recorder.add(
            COMM,
            "reduce",
            reduction.start_s,
            end_s,
            step=step,
            axis="data",
            num_bytes=reduction.num_bytes,
        )
        chosen.num_waited += 1
        chosen.step = step

    def num_copies(self, parameter: nn.Parameter) -> int:
        """Return how many ranks of a replica hold the gradient of a parameter."""
        member = next(i for i, p in enumerate(self.parameters) if p is parameter)
        holding = (n for n, bucket in enumerate(self.layout) if member in bucket.members)
        return self._reach[next(holding)].num_copies

    def close(self) -> None:
        """Remove the hooks; parameters keep their gradients."""
        for hook in self._hooks:
            hook.remove()

    def _check(self, parameter: Tensor) -> None:
        if parameter.grad is not self._selected[id(parameter)]:
            raise ConfigError(
                "a gradient was replaced during the step (zero_grad(set_to_none=True) or "
                "p.grad = ...): leave gradients to the run, it zeroes them before each step"
            )

    def _end_s(self, reduction: Reduction) -> float:
        """Return the end of a reduction, which may be long before the wait for it."""
        now_s, finished_s = self._recorder.clock(), reduction.handle.finished_s
        # The handle may use another clock than the recorder; then its time lies outside.
        if finished_s is not None and reduction.start_s <= finished_s <= now_s:
            return finished_s
        return now_s

    def _make_set(self) -> _Set:
        made = _Set()
        for bucket, reach in zip(self.layout, self._reach, strict=True):
            first = self.parameters[bucket.members[0]]
            buffer = empty_for(reach.group, bucket.num_elements, first).zero_()
            made.buffers.append(buffer)
            for member, offset in zip(bucket.members, bucket.offsets, strict=True):
                parameter = self.parameters[member]
                part = buffer[offset : offset + parameter.numel()]
                made.views[id(parameter)] = part.view_as(parameter)
        return made


def _plan(
    parameters: Sequence[nn.Parameter], reaches: Sequence[Reach], bucket_bytes: int
) -> list[Bucket]:
    """Bucket gradients of equal dtype and reach; buckets keep the order of backward."""
    kinds = [
        (p.dtype, id(reach.group), reach.num_copies)
        for p, reach in zip(parameters, reaches, strict=True)
    ]
    found = []
    for kind in dict.fromkeys(kinds):
        members = [i for i, each in enumerate(kinds) if each == kind]
        found += _plan_kind(parameters, members, bucket_bytes // kind[0].itemsize)
    return found


def _plan_kind(
    parameters: Sequence[nn.Parameter], members: Sequence[int], max_elements: int
) -> list[Bucket]:
    sizes = [parameters[i].numel() for i in members]
    bound = max(1, max_elements)
    buckets = plan_buckets(sizes, bound, last_max_elements=max(1, bound // 8))
    return [
        Bucket(tuple(members[i] for i in bucket.members), bucket.offsets, bucket.num_elements)
        for bucket in buckets
    ]


def sum_of_squares(tensor: Tensor) -> float:
    """Return the sum over all elements in double precision, part by part.

    The parts depend on the tensor only, so the same gradients have the same sum on any rank.
    """
    flat = tensor.reshape(-1)
    starts = range(0, max(1, flat.numel()), SQUARED_AT_ONCE)
    sums = [flat[start : start + SQUARED_AT_ONCE].double().square().sum() for start in starts]
    return float(torch.stack(sums).sum())


def global_norm(buffers: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all elements of all buffers, as a scalar of at least fp32."""
    if not buffers:
        return torch.zeros(())
    wide = max((buffer.dtype for buffer in buffers), key=lambda dtype: dtype.itemsize)
    dtype = wide if wide.itemsize >= 4 else torch.float32
    norms = [torch.linalg.vector_norm(buffer, dtype=dtype) for buffer in buffers]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return the factor that scales this norm down to `max_norm`; None if it is smaller."""
    # Same rule as torch.nn.utils.clip_grad_norm_, so that a run can be compared with a plain loop.
    factor = max_norm / (norm + 1e-6)
    return factor if bool(factor < 1) else None
