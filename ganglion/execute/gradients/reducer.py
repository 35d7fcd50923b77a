"""Sum each bucket of gradients over the replicas while backward still runs.

During the last microbatch of a step the reducer is armed: hooks report each final gradient, and a
full bucket starts its all-reduce at once.

    backward   |  f  e | d  c | b  a |
    bucket 0           ~~~~~~~~            all-reduce of e, f while d..a are computed
    bucket 1                  ~~~~~~~~
    bucket 2                         ~~~~  only this one is exposed

Without overlap the same all-reduces start in the same order after backward: the arithmetic is the
same, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from ganglion.errors import ConfigError
from ganglion.execute.gradients.buckets import GradientBuckets, Reach, Reduction
from ganglion.trace import Recorder


class LateGradients(Protocol):
    """Gradients that are not complete when autograd is done with their parameters."""

    def begin(self, parameter: Tensor) -> None:
        """Note that nothing more will be added to a gradient, which may not be a late one."""

    def finish(self, parameter: Tensor) -> None:
        """Return when a gradient is complete."""


class GradientReducer:
    """Owns the gradients of some parameters and sums them over their groups."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        reach: Reach | Mapping[str, Reach],
        recorder: Recorder,
        *,
        bucket_bytes: int,
        overlap: bool,
        late: LateGradients | None = None,
    ) -> None:
        """Give each parameter a gradient inside a bucket of at most `bucket_bytes`.

        `reach` has the ranks to sum over, one for all or by name. A bucket waits for its gradients
        that are `late`.
        """
        self._late = late
        self._buckets = GradientBuckets(parameters, reach, recorder, bucket_bytes=bucket_bytes)
        self.buffers = self._buckets.buffers(0)
        self._bucket_of = {
            id(self._buckets.parameters[member]): number
            for number, bucket in enumerate(self._buckets.layout)
            for member in bucket.members
        }
        reaches = [reach] if isinstance(reach, Reach) else reach.values()
        is_shared = any(each.group.size > 1 for each in reaches)
        self._names = {id(p): name for name, p in parameters.items()}
        # After those of the buckets: a replaced gradient is noticed before it counts as final.
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for p in self._buckets.parameters
            if overlap and is_shared
        ]
        self._armed = False
        self._missing: list[int] = []
        self._final: set[int] = set()

    def zero(self) -> None:
        """Zero all gradients, before the first microbatch of a step."""
        self._buckets.zero(0)
        self._buckets.select(0)

    def arm(self) -> None:
        """Prepare for the last backward of a step."""
        self._missing = [len(bucket.members) for bucket in self._buckets.layout]
        self._final.clear()
        self._armed = True

    def finish(self, step: int) -> None:
        """Return when every bucket holds the sum over the group."""
        self.start(step)
        self.wait()

    def start(self, step: int) -> None:
        """Start the sums of all buckets that are not started yet; `wait` must follow."""
        self._armed = False
        # Parameters without a backward leave their buckets incomplete: zeros are reduced too.
        if self._late is not None:
            for parameter in self._buckets.parameters:
                self._late.begin(parameter)
        while len(self._started) < len(self._buckets.layout):
            self._start_next()
        self._buckets.start(0, step)

    def wait_bucket(self, number: int) -> None:
        """Return when the next bucket holds its sum; `wait` must follow."""
        self._buckets.wait_bucket(0, number)

    def wait(self) -> None:
        """Return when all buckets hold their sums."""
        self._buckets.wait(0)

    def square_norm(self) -> float:
        """Return this rank's part of the sum of squares of all gradients."""
        return self._buckets.square_norm(0)

    def close(self) -> None:
        """Detach from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._buckets.close()

    @property
    def buckets(self) -> GradientBuckets:
        """The gradients as they are reduced."""
        return self._buckets

    @property
    def _started(self) -> Sequence[Reduction]:
        return self._buckets.started(0)

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._count_final(parameter)
        if self._late is not None:
            self._late.begin(parameter)
        # One fixed order on all ranks, in any order of autograd: collectives must match.
        while (number := len(self._started)) < len(self._missing) and not self._missing[number]:
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._started)
        if self._late is not None:
            for member in self._buckets.layout[number].members:
                self._late.finish(self._buckets.parameters[member])
        self._buckets.start_bucket(0, number)

    def _count_final(self, parameter: Tensor) -> None:
        if id(parameter) in self._final:
            raise ConfigError(
                f"the gradient of {self._names[id(parameter)]!r} became final twice in one "
                f"backward, as in two segments of checkpoint(use_reentrant=True), so it cannot be "
                f"reduced while backward runs: use checkpoint(..., use_reentrant=False)"
            )
        self._final.add(id(parameter))
        self._missing[self._bucket_of[id(parameter)]] -= 1
