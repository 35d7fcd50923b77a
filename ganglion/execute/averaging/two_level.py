"""Two levels: gradients are averaged inside a host, and hosts exchange with a centre.

The processes of a host are one worker: they hold the same weights and share a bigger batch. Only
the first of them exchanges with other hosts, and then broadcasts its weights inside the host
(You, Buluc, Demmel 2017, section 6.2, as the inner level of algorithm 4).

    host 0   [ p0 == p1 == p2 == p3 ]   sum of gradients, every step
               |
    host 1   [ p4 == p5 == p6 == p7 ]   p0 and p4 exchange, every tau steps
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ganglion.decide.plan import ASYNC_MODES
from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods import (
    MEAN_OF,
    ExchangeMetrics,
    Method,
    Packed,
    State,
    SyncSgd,
)
from ganglion.execute.averaging.options import AveragingOptions
from ganglion.execute.averaging.sync_factory import sync_method, sync_sgd
from ganglion.execute.averaging.workers import Workers
from ganglion.execute.comm import Group


class TwoLevel:
    """Gradient averaging in the inner group, and a method of averaging between first members."""

    def __init__(
        self, packed: Packed, inside: Group, gradients: SyncSgd, between: Method | None, period: int
    ) -> None:
        """Combine the levels; `between` is None except at the first member of each inner group.

        Its exchanges happen before or after every `period`-th step.
        """
        assert (between is not None) == (inside.index == 0), "only first members exchange"
        self._packed, self._inside, self._gradients = packed, inside, gradients
        self._between, self._period = between, period
        self._num_steps = 0
        self._center = packed.gather().clone()

    def begin_pass(self) -> None:
        """Start the exchange between hosts, at the first process."""
        if self._between is not None:
            self._between.begin_pass()

    def before_step(self, lr: float) -> None:
        """Average the gradients of the host, and finish the exchange between hosts."""
        self._gradients.before_step(lr)
        if self._between is not None:
            self._between.before_step(lr)

    def after_step(self, lr: float) -> None:
        """Broadcast the weights after the exchange inside the host."""
        self._gradients.after_step(lr)
        if self._between is not None:
            self._between.after_step(lr)
        self._num_steps += 1
        if self._num_steps % self._period in (0, 1 % self._period):
            self._share()

    def sync_now(self, lr: float) -> None:
        """Exchange between hosts now; all processes call it."""
        if self._between is not None:
            self._between.sync_now(lr)
        self._share()

    def center(self) -> Tensor:
        """Return the centre that this host received last."""
        return self._center if self._between is None else self._between.center()

    def flush(self) -> None:
        """Finish exchanges in flight between hosts."""
        if self._between is not None:
            self._between.flush()
        self._share()

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements between hosts at the first process, else those inside."""
        method: Method = self._gradients if self._between is None else self._between
        return method.metrics()

    def tensors(self) -> list[Tensor]:
        """Return the memory of both levels."""
        between = [] if self._between is None else self._between.tensors()
        return [self._center, *self._gradients.tensors(), *between]

    def state_dict(self) -> State:
        """Return the state between hosts at the first process, else the centre only."""
        if self._between is not None:
            return self._between.state_dict()
        return {"center": self._center.clone(), "step": self._num_steps, "version": 0}

    def load_state_dict(self, state: State) -> None:
        """Continue from the result of state_dict."""
        if self._between is not None:
            self._between.load_state_dict(state)
        self._center.copy_(state["center"])
        self._num_steps = int(state["step"])

    def close(self) -> None:
        """Release both levels."""
        self._gradients.close()
        if self._between is not None:
            self._between.close()

    def _share(self) -> None:
        self._inside.broadcast(self._packed.gather(), 0).wait()
        self._packed.scatter()
        if self._between is not None:
            self._center.copy_(self._between.center())
        self._inside.broadcast(self._center, 0).wait()


def two_level(options: AveragingOptions, packed: Packed, workers: Workers, lr: float) -> TwoLevel:
    """Return both levels: gradients by `reduction` inside a worker, `options` between workers."""
    inside = workers.inside
    if options.mode in ASYNC_MODES:
        raise ConfigError(
            f'mode = "{options.mode}" has workers of one process, but inner = {inside.size}: give '
            f'inner=1, or mode="sync"'
        )
    gradients = sync_sgd(packed, inside, options.reduction, options.max_elements(packed))
    options = dataclasses.replace(options, reduction=MEAN_OF)  # it belongs to the inner level
    between = None if inside.index else sync_method(options, packed, workers.between, lr)
    # With a delay or fragments, an exchange may end after any step.
    is_simple = options.delay == 0 and options.fragments == 1
    return TwoLevel(packed, inside, gradients, between, options.tau if is_simple else 1)
