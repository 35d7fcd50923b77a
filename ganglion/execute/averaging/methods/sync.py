"""Synchronous methods: summed gradients, and Sync EASGD with its exchange hidden behind the pass.

Sync EASGD (Zhang 2015, equations 3 to 6; You 2017, algorithms 2 and 3), g and both forces at the
old weights:

    w' = w - lr * g - alpha * (w - c)            c' = c + alpha * sum of (w - c)

| version | centre           | the exchange runs                     |
|---------|------------------|---------------------------------------|
| 1       | root, in host memory | between backward and step         |
| 2       | root             | between backward and step             |
| 3       | root             | beside forward and backward           |

w and c do not change during the pass, so version 3 gives the bits of version 2. The force is taken
before the optimizer's step and subtracted after it. For SGD, with or without momentum, that is the
formula above; for others the force stays outside the preconditioner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from ganglion.decide.plan import SYNC
from ganglion.decide.schedules.exchanges import ElasticRate, Exchange, SyncExchange
from ganglion.errors import CommError
from ganglion.execute.averaging.methods.centers import Center
from ganglion.execute.averaging.methods.method import NoOverlap, State, elastic_force
from ganglion.execute.averaging.methods.metrics import ExchangeMetrics, Motion
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.sums import Meter, Sum, Votes
from ganglion.execute.comm import Group

SUM_OF, MEAN_OF = "sum", "mean"


class SyncEasgd:
    """Sync EASGD: all workers exchange at once, every tau steps."""

    def __init__(
        self,
        packed: Packed,
        center: Center,
        votes: Votes,
        turns: SyncExchange,
        rate: ElasticRate,
        meter: Meter,
        *,
        overlap: bool,
    ) -> None:
        """Combine the parts; the weights and the centre must be equal on all workers."""
        self._packed, self._center, self._votes = packed, center, votes
        self.turns, self._rate, self._meter = turns, rate, meter
        self._overlap = overlap
        self._motion = Motion()
        self._awaited: Exchange | None = None  # started, and perhaps not complete
        self._cast: dict[int, bool] | None = None  # the votes on it, once complete
        self._force: Tensor | None = None
        self._last_force: Tensor | None = None

    def begin_pass(self) -> None:
        """Start the exchange of this step, so that forward and backward hide it."""
        if self._overlap:
            self._start()

    def before_step(self, lr: float) -> None:
        """Finish the exchange of this step, if any: move the centre and keep the force."""
        self._start()
        self._force = self._finish(lr)
        if self._force is not None:
            self._motion.begin_step(self._packed)

    def after_step(self, lr: float) -> None:
        """Subtract the force, which belongs to the weights before the step."""
        self._motion.end_step(self._packed)
        self._subtract()
        self.turns.on_step()

    def sync_now(self, lr: float) -> None:
        """Exchange now, in place of this step's own exchange if it has one; all workers call it."""
        self._start()
        if self._awaited is None:
            self._begin(self.turns.start_now())
        self._force = self._finish(lr)
        self._subtract()

    def center(self) -> Tensor:
        """Return the centre; with a root, the others have that of the last exchange."""
        self.flush()  # an exchange in flight may write here
        return self._center.flat

    def flush(self) -> None:
        """Wait for data in flight; the next step applies them."""
        if self._awaited is not None:
            self._wait()

    def abandon(self) -> None:
        """Give up the exchange in flight, without waiting; it will be started again."""
        if self._awaited is not None:
            self._hold_back()
        self._awaited = None
        self.turns.discard()

    def catch_up(self, center: Tensor, version: int, lr: float) -> None:
        """Do the worker's half of an exchange that was given up here and applied by others."""
        for exchange in self.turns.missed(version):
            worker, before = self._packed.gather(), self._center.before()
            if before is None:  # it had not arrived from the root
                worker.copy_(center)
                self._packed.scatter()
                return
            alpha = self._rate.following_alpha(lr, exchange.num_workers, self.turns.tau, SYNC)
            self._packed.subtract(elastic_force(worker, before.to(worker.device), alpha))

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements so far."""
        distance, size = consensus(self._packed.gather(), self._center.flat)
        seen = self._motion.seen(turns_seen(self.turns, self._meter), size)
        host_s = self._center.host_s
        # The paper counts weights that travel to and from the host apart.
        seconds = {} if host_s is None else {"param_host_dev": seen.wait_s, "upd_host": host_s}
        return replace(seen, consensus=distance, force=self._force_norm(), seconds=seconds)

    def tensors(self) -> list[Tensor]:
        """Return the centre and the buffers of an exchange."""
        return self._center.tensors()

    def state_dict(self) -> State:
        """Return the centre and the counts; an exchange in flight starts again after a resume."""
        self.flush()
        sums = self._center.sums
        return {
            "center": self._center.flat.clone(),
            "step": self.turns.step,
            "version": self.turns.version,
            "lag": self._center.lag,
            "sums": {} if sums is None else sums.state(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from the result of state_dict; the weights must be loaded, too."""
        self._drop()
        self._center.flat.copy_(state["center"])
        if self._center.sums is not None:
            self._center.sums.load_state(state.get("sums", {}))
        self.turns.move_to(int(state["step"]), int(state["version"]))

    def close(self) -> None:
        """End the exchange in flight without applying it."""
        self._drop()

    # --- parts ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._awaited is None:
            self._begin(self.turns.starting())

    def _begin(self, started: list[Exchange]) -> None:
        for exchange in started:
            self._packed.check()
            worker = self._packed.gather()
            self._center.start(worker)
            self._votes.start(worker)
            self._awaited, self._cast = exchange, None

    def _wait(self) -> dict[int, bool]:
        """Wait for the exchange in flight; return the votes on it."""
        if self._cast is None:
            try:
                self._center.wait()
                self._cast = self._votes.wait()
            except CommError:
                self.abandon()
                raise
        return self._cast

    def _finish(self, lr: float) -> Tensor | None:
        """Return the force of the exchange in flight, if all workers vote to apply it."""
        if self._awaited is None:
            return None
        votes = self._wait()
        exchange, self._awaited = self._awaited, None
        num_workers = exchange.num_workers
        alpha = self._rate.following_alpha(lr, num_workers, self.turns.tau, SYNC)
        if not self.turns.on_votes(exchange, votes):
            self._hold_back()
            return None
        self._last_force = self._center.apply(self._packed.gather(), alpha, num_workers)
        self._motion.note(self._center.moved)
        return self._last_force

    def _subtract(self) -> None:
        if self._force is not None:
            self._packed.subtract(self._force)
            self._force = None

    def _drop(self) -> None:
        """End the exchange in flight without applying it."""
        if self._awaited is not None:
            self._wait()
        self.abandon()

    def _hold_back(self) -> None:
        if self._center.sums is not None:
            self._center.sums.discard()

    def _force_norm(self) -> float:
        if self._last_force is None or self._awaited is not None:
            return 0.0  # none was exchanged yet, or its memory is in use again
        return float(torch.linalg.vector_norm(self._last_force))


def turns_seen(turns: SyncExchange, meter: Meter) -> ExchangeMetrics:
    """Return the metrics of synchronous turns, in which all workers have the newest centre."""
    return replace(
        meter.metrics(),
        num_workers=len(turns.members),
        concurrency=len(turns.members),
        num_steps=turns.step,
        num_exchanges=turns.version,
        num_discarded=turns.num_discarded,
        staleness=Counter({0: turns.version}),
    )


def consensus(worker: Tensor, center: Tensor) -> tuple[float, float]:
    """Return |w - c| / |c|, and |c|."""
    size = float(torch.linalg.vector_norm(center))
    distance = float(torch.linalg.vector_norm(worker - center.to(worker.device)))
    return distance / size if size else 0.0, size


class SyncSgd(NoOverlap):
    """One model on all workers: gradients are summed, or averaged, before every step."""

    def __init__(self, packed: Packed, group: Group, sums: Sum, meter: Meter, how: str) -> None:
        """Reduce gradients by `how`: "sum" as in the paper, or "mean"."""
        self._packed, self._group, self._sums, self._meter = packed, group, sums, meter
        self._scale = 1.0 / group.size if how == MEAN_OF else 1.0
        self._num_steps = 0

    def before_step(self, lr: float) -> None:
        """Give every worker the reduced gradient."""
        self._packed.check()
        gradients = self._packed.gather_gradients()
        self._sums.buffer.copy_(gradients)
        self._sums.start()
        gradients.copy_(self._sums.wait()).mul_(self._scale)
        self._packed.scatter_gradients()

    def after_step(self, lr: float) -> None:
        """Count the step."""
        self._num_steps += 1

    def sync_now(self, lr: float) -> None:
        """Do nothing: the weights are equal on all workers."""

    def center(self) -> Tensor:
        """Return the weights, which are equal on all workers."""
        return self._packed.gather()

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements so far; every step is an exchange."""
        return replace(
            self._meter.metrics(),
            num_workers=self._group.size,
            concurrency=self._group.size,
            num_steps=self._num_steps,
            num_exchanges=self._num_steps,
            staleness=Counter({0: self._num_steps}),
        )

    def tensors(self) -> list[Tensor]:
        """Return the buffer in which gradients are summed."""
        return self._sums.tensors()

    def state_dict(self) -> State:
        """Return the weights and the counts."""
        return {"center": self.center().clone(), "step": self._num_steps, "version": 0}

    def load_state_dict(self, state: State) -> None:
        """Continue from the result of state_dict."""
        self._packed.gather().copy_(state["center"])
        self._packed.scatter()
        self._num_steps = int(state["step"])

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
