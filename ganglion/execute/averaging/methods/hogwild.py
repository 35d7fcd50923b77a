"""Methods without locks: workers of one host write the same centre at any time.

    worker 0   reads c, adds e0 --.
    worker 1   reads c, adds e1 ---> c, in shared memory
    worker 2   reads c, adds e2 --'

A word of an addition may be lost and a reader may see half of a write: that is the method
(Hogwild), and the loss is measured. There is no other race: each worker has its own counters. If
all P workers read the same centre, their additions are one synchronous step; that bounds alpha.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ganglion.decide.plan import HOGWILD
from ganglion.decide.schedules.exchanges import STALENESS_PER_WORKER, ElasticRate
from ganglion.errors import ConfigError, ProtocolError
from ganglion.execute.averaging.methods.method import NoOverlap, State, elastic_force
from ganglion.execute.averaging.methods.metrics import ExchangeMetrics, Motion
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.shared_center import SharedCenter


class _Hogwild(NoOverlap):
    """Common part of both methods: the start, counts, and the bound on staleness."""

    def __init__(
        self,
        packed: Packed,
        center: SharedCenter,
        worker: int,
        *,
        tau: int = 1,
        max_staleness: int | None = None,
    ) -> None:
        """Start at the centre; `max_staleness` is 4 per worker if not given."""
        num_workers = center.num_workers
        if not 0 <= worker < num_workers:
            raise ConfigError(f"worker = {worker}: this centre has workers 0 to {num_workers - 1}")
        if tau < 1:
            raise ConfigError(f"tau = {tau}: give the steps between two exchanges, 1 or more")
        if (packed.numel, packed.flat.dtype) != (center.numel, center.dtype):
            raise ProtocolError(
                f"worker {worker} has {packed.numel} weights of {packed.flat.dtype}, the centre "
                f"{center.numel} of {center.dtype}: give all the same model"
            )
        self._packed, self._shared, self._worker, self._tau = packed, center, worker, tau
        self._limit = STALENESS_PER_WORKER * num_workers if max_staleness is None else max_staleness
        self._num_steps = self._num_exchanges = self._num_discarded = 0
        self._staleness: Counter[int] = Counter()
        self._force_norm = 0.0
        self._motion = Motion()
        self._seen = torch.empty(center.numel, dtype=center.dtype)
        self._seen_version = 0
        self._look()
        self._start()

    def center(self) -> Tensor:
        """Return a copy of the present centre, which others continue to write."""
        now = torch.empty_like(self._seen)
        self._shared.read(now)
        return now

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements so far."""
        size = float(torch.linalg.vector_norm(self._seen))
        away = self._packed.gather().to("cpu") - self._seen
        metrics = ExchangeMetrics(
            num_workers=self._shared.num_workers,
            concurrency=min(self._shared.num_workers, 1 + max(self._staleness, default=0)),
            num_steps=self._num_steps,
            num_exchanges=self._num_exchanges,
            num_discarded=self._num_discarded,
            sent_bytes=self._num_exchanges * self._seen.nbytes,
            staleness=self._staleness.copy(),
            consensus=float(torch.linalg.vector_norm(away)) / size if size else 0.0,
            force=self._force_norm,
            lost_update=self._shared.lost_update(),
        )
        return self._motion.seen(metrics, size)

    def tensors(self) -> list[Tensor]:
        """Return the centre as it was last read; worker 0 also counts the shared memory."""
        return [self._seen, self._shared.flat] if self._worker == 0 else [self._seen]

    def close(self) -> None:
        """Do nothing: additions of this worker stay in the centre."""

    def _restore(self, center: Tensor) -> None:
        if self._worker == 0:
            self._shared.restart(center)

    def _look(self) -> None:
        """Read the centre without a lock."""
        self._seen_version = self._shared.version
        self._shared.read(self._seen)

    def _start(self) -> None:
        self._packed.check()
        self._packed.gather().copy_(self._seen)
        self._packed.scatter()

    def _is_fresh(self) -> bool:
        """Return whether the centre read last is recent enough to write from; count its age."""
        staleness = self._shared.version - self._seen_version
        self._staleness[staleness] += 1
        self._num_discarded += staleness > self._limit
        return staleness <= self._limit

    def _add(self, delta: Tensor) -> None:
        self._force_norm = float(torch.linalg.vector_norm(delta))
        self._shared.add(self._worker, delta)
        self._motion.note(self._force_norm)
        self._num_exchanges += 1


class HogwildEasgd(_Hogwild):
    """Elastic averaging: c += alpha * (w - c) and w -= the same force, every tau steps."""

    def __init__(
        self,
        packed: Packed,
        center: SharedCenter,
        rate: ElasticRate,
        worker: int,
        *,
        tau: int = 1,
        max_staleness: int | None = None,
    ) -> None:
        """Start at the centre; `max_staleness` is 4 per worker if not given."""
        super().__init__(packed, center, worker, tau=tau, max_staleness=max_staleness)
        self._rate = rate
        self._force: Tensor | None = None
        self._taken_at = -1

    def before_step(self, lr: float) -> None:
        """Move the centre by the force of these weights, and keep the force."""
        if self._num_steps % self._tau == 0 and self._taken_at != self._num_steps:
            self._exchange(lr)
            self._motion.begin_step(self._packed)

    def after_step(self, lr: float) -> None:
        """Subtract the force, which belongs to the weights before the step."""
        self._motion.end_step(self._packed)
        self._subtract()
        self._num_steps += 1

    def sync_now(self, lr: float) -> None:
        """Exchange now, in place of this step's own exchange if it has one."""
        if self._force is None:
            self._exchange(lr)
        self._subtract()

    def state_dict(self) -> State:
        """Return the counts and the centre, after a pending force is applied."""
        self._subtract()
        return {"center": self.center(), "step": self._num_steps, "taken_at": self._taken_at}

    def load_state_dict(self, state: State) -> None:
        """Continue at the saved step; worker 0 also restores the centre."""
        self._force = None
        self._num_steps, self._taken_at = int(state["step"]), int(state.get("taken_at", -1))
        self._restore(state["center"])

    def _exchange(self, lr: float) -> None:
        self._packed.check()
        num_workers = self._shared.num_workers
        alpha = self._rate.checked_alpha(lr, num_workers, self._tau, HOGWILD)
        worker = self._packed.gather().to("cpu")
        while True:
            self._look()
            self._force = elastic_force(worker, self._seen, alpha)
            if self._is_fresh():
                break  # else this worker slept since it read the centre
        self._add(self._force)
        self._taken_at = self._num_steps

    def _subtract(self) -> None:
        if self._force is not None:
            self._packed.subtract(self._force)
            self._force = None


class HogwildSgd(_Hogwild):
    """Async SGD without a lock: updates are added, and the worker continues from the centre.

    tau steps make one update, which is not added if its weights are too old.
    """

    def after_step(self, lr: float) -> None:
        """Add the update of the last tau steps, and continue from the centre."""
        self._num_steps += 1
        if self._num_steps % self._tau == 0:
            self.sync_now(lr)

    def sync_now(self, lr: float) -> None:
        """Add the update since the last exchange, and continue from the centre."""
        if self._is_fresh():
            self._add(self._packed.gather().to("cpu") - self._seen)
        self._look()
        self._start()

    def state_dict(self) -> State:
        """Return the counts, the centre, and the centre that this worker started from."""
        return {"center": self.center(), "step": self._num_steps, "base": self._seen.clone()}

    def load_state_dict(self, state: State) -> None:
        """Continue at the saved step; worker 0 also restores the centre."""
        self._num_steps = int(state["step"])
        self._seen.copy_(state["base"] if "base" in state else state["center"])
        self._seen_version = self._shared.version
        self._restore(state["center"])
