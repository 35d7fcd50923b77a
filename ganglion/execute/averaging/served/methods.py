"""Methods with a served centre: each worker exchanges on its own.

| class       | the worker sends       | and then                            | server   |
|-------------|------------------------|-------------------------------------|----------|
| ServedEasgd | its weights w          | gets c, w -= alpha * (w - c)        | Elastic  |
| ServedSgd   | what its optimizer did | starts again from the new centre    | Additive |

ServedEasgd is Async EASGD first come first served, Async MEASGD if the optimizer has momentum, and
Original EASGD if the server goes round robin. ServedSgd is Async SGD with tau = 1 and DOWNPOUR with
more; Async MSGD has its momentum in the rule (at the master) or in the optimizer (at the worker).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ganglion.decide.plan import ASYNC
from ganglion.decide.schedules.exchanges import EXCHANGE, PUSH, ElasticRate
from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods import (
    ExchangeMetrics,
    Motion,
    NoOverlap,
    Packed,
    State,
    elastic_force,
)
from ganglion.execute.averaging.served.shards import Shard, ShardedCenter
from ganglion.execute.averaging.served.wire import AS_SENT, Envelope


class _Served:
    """Common part of served methods: the start at the centre, and the counts."""

    _is_atomic = False  # whether one request reads and writes the centre

    def __init__(
        self, packed: Packed, center: ShardedCenter, *, num_workers: int, tau: int
    ) -> None:
        if tau < 1:
            raise ConfigError(f"tau = {tau}: give the steps between two exchanges, 1 or more")
        self._packed, self._center = packed, center
        self._num_expected, self._tau = num_workers, tau
        self._num_steps = self._num_exchanges = 0
        self._force_norm = self._distance = self._center_norm = 0.0
        self._motion = Motion()
        self._start_at(center.join())

    @property
    def _num_workers(self) -> int:
        """The number of workers that share the rate: the expected, later the present ones."""
        has_all = self._center.max_members >= self._num_expected
        return self._center.num_members if has_all else self._num_expected

    def center(self) -> Tensor:
        """Return the present centre of the servers."""
        return self._center.look()

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements so far."""
        center = self._center
        stale = 0 if self._is_atomic else max(center.staleness, default=0)
        # Expected workers count even after they left, additional ones while they are present.
        num_workers = max(self._num_expected, center.num_members)
        metrics = ExchangeMetrics(
            num_workers=num_workers,
            concurrency=min(num_workers, 1 + stale),
            num_retries=center.num_retries,
            num_steps=self._num_steps,
            num_exchanges=self._num_exchanges,
            num_discarded=center.num_refused,
            sent_bytes=center.sent_bytes,
            wait_s=center.wait_s,
            comm_s=center.comm_s,
            exposed_s=min(center.wait_s, center.comm_s),
            staleness=center.staleness.copy(),
            consensus=self._distance,
            force=self._force_norm,
            max_queue=center.max_queue,
            seconds={
                "param_host_dev": max(0.0, center.wait_s - center.apply_s),
                "upd_host": min(center.apply_s, center.wait_s),
            },
        )
        return self._motion.seen(metrics, self._center_norm)

    def tensors(self) -> list[Tensor]:
        """Return the buffers of messages, and the vectors they are made from."""
        return [*self._center.tensors(), *self._kept()]

    def _kept(self) -> list[Tensor]:
        raise NotImplementedError

    def _start_at(self, center: Tensor) -> None:
        self._packed.check()
        self._packed.gather().copy_(center)
        self._packed.scatter()

    def _note(self, force: float, distance: float, center_norm: float, moved: float) -> None:
        self._num_exchanges += 1
        self._force_norm, self._center_norm = force, center_norm
        self._motion.note(moved)
        self._distance = distance / center_norm if center_norm else 0.0


class ServedEasgd(_Served):
    """Elastic averaging: weights go up, the centre comes down, and it is never stale.

    The force is taken before a step and subtracted after it.
    """

    _is_atomic = True

    def __init__(
        self,
        packed: Packed,
        center: ShardedCenter,
        rate: ElasticRate,
        lr: Callable[[], float],
        *,
        num_workers: int,
        tau: int,
        overlap: bool = True,
    ) -> None:
        """Join, and start at the centre.

        `lr()` is the learning rate of the coming step: an exchange that starts before the forward
        needs its rate by then. With `overlap` it runs beside forward and backward.
        """
        super().__init__(packed, center, num_workers=num_workers, tau=tau)
        self._rate, self._lr, self._overlap = rate, lr, overlap
        self._alpha = 0.0
        self._is_asked = False
        self._asked_at = -1  # the step of the last exchange
        self._force = torch.zeros(center.numel, dtype=center.dtype)
        self._has_force = False

    def begin_pass(self) -> None:
        """Start the exchange of this step, so that forward and backward hide it."""
        if self._overlap:
            self._ask_if_due()

    def before_step(self, lr: float) -> None:
        """Start the exchange if no pass did; finish it unless it may overlap the step."""
        self._ask_if_due()
        if self._is_asked:
            self._motion.begin_step(self._packed)
        if not self._overlap:
            self.flush()

    def after_step(self, lr: float) -> None:
        """Subtract the force, which belongs to the weights before the step."""
        self._motion.end_step(self._packed)
        self.flush()
        self._subtract()
        self._num_steps += 1

    def sync_now(self, lr: float) -> None:
        """Exchange now, in place of this step's own exchange if it has one."""
        if not self._is_asked and not self._has_force:
            self._ask()
        self.flush()
        self._subtract()

    def flush(self) -> None:
        """Wait for the exchange in flight; the next step applies it."""
        if self._is_asked:
            self._receive()
            self._is_asked = False

    def state_dict(self) -> State:
        """Return the counts and the centre, after the exchange in flight is applied."""
        self.flush()
        self._subtract()
        center = self.center()
        return {"center": center, "step": self._num_steps, "asked_at": self._asked_at}

    def load_state_dict(self, state: State) -> None:
        """Continue at the saved step; the CenterHost restores the centre."""
        self.flush()
        self._has_force = False
        self._num_steps = int(state["step"])
        self._asked_at = int(state.get("asked_at", -1))

    def close(self) -> None:
        """Finish and apply the exchange in flight, then leave."""
        try:
            self.flush()
            self._subtract()
        finally:
            self._center.leave()

    # --- parts ---------------------------------------------------------------------------------

    def _kept(self) -> list[Tensor]:
        return [self._force]

    def _ask_if_due(self) -> None:
        if self._asked_at != self._num_steps and self._num_steps % self._tau == 0:
            self._ask()

    def _ask(self) -> None:
        self._packed.check()
        lr, num_workers = self._lr(), self._num_workers
        self._alpha = self._rate.following_alpha(lr, num_workers, self._tau, ASYNC)
        self._center.fill(self._packed.gather())
        self._center.ask(EXCHANGE, step=self._num_steps, rate=self._alpha)
        self._is_asked, self._asked_at = True, self._num_steps

    def _receive(self) -> None:
        """Wait for all answers and fill the force."""
        square = 0.0
        for part, answer in self._center.answers():
            out, sent = self._force[part.begin : part.end], part.link.block.payload
            elastic_force(sent, answer.payload, self._alpha, out=out)
            square += float(torch.linalg.vector_norm(answer.payload)) ** 2
        force = float(torch.linalg.vector_norm(self._force))
        distance = force / self._alpha if self._alpha else 0.0
        self._note(force, distance, square**0.5, moved=force)
        self._has_force = True

    def _subtract(self) -> None:
        if self._has_force:
            self._packed.subtract(self._force)
            self._has_force = False


class ServedSgd(NoOverlap, _Served):
    """Async SGD, Async MSGD, DOWNPOUR: updates go to the centre, where the worker continues.

    An update that is too old is refused and lost, and the worker starts again from the centre.
    """

    def __init__(
        self,
        packed: Packed,
        center: ShardedCenter,
        *,
        num_workers: int,
        tau: int = 1,
        has_momentum: bool = False,
    ) -> None:
        """Join, and start at the centre; tau steps make one update.

        `has_momentum` if the rule of the servers has a velocity, which checkpoints hold.
        """
        super().__init__(packed, center, num_workers=num_workers, tau=tau)
        self._has_momentum = has_momentum
        self._base = packed.gather().to("cpu", copy=True)  # the centre that w started from
        self._update = torch.empty_like(self._base)

    def after_step(self, lr: float) -> None:
        """Push the update of the last tau steps, and continue from the new centre."""
        self._num_steps += 1
        if self._num_steps % self._tau == 0:
            self._exchange()

    def sync_now(self, lr: float) -> None:
        """Push the update since the last exchange."""
        self._exchange()

    def state_dict(self) -> State:
        """Return the counts, the centre with its velocity, and the start of this worker."""
        center, velocity = self.moving_center()
        state: State = {"center": center, "step": self._num_steps, "base": self._base.clone()}
        return state if velocity is None else {**state, "velocity": velocity}

    def moving_center(self) -> tuple[Tensor, Tensor | None]:
        """Return the present centre, and its velocity if it has momentum."""
        return self._center.recall() if self._has_momentum else (self.center(), None)

    def load_state_dict(self, state: State) -> None:
        """Continue at the saved step; the CenterHost restores the centre."""
        self._num_steps = int(state["step"])
        self._base.copy_(state["base"] if "base" in state else state["center"])

    def _kept(self) -> list[Tensor]:
        return [self._base, self._update]

    def close(self) -> None:
        """Leave; steps since the last exchange stay with the worker."""
        self._center.leave()

    def _exchange(self) -> None:
        self._packed.check()
        worker = self._packed.gather().to("cpu")
        self._center.fill(torch.sub(worker, self._base, out=self._update))
        self._center.ask(PUSH, step=self._num_steps)
        moved = 0.0
        for part, answer in self._center.answers():
            self._base[part.begin : part.end] = answer.payload
            moved = math.hypot(moved, self._moved(part, answer.envelope))
        self._start_at(self._base)
        norm = float(torch.linalg.vector_norm(self._update))
        self._note(norm, norm, float(torch.linalg.vector_norm(self._base)), moved)

    def _moved(self, part: Shard, envelope: Envelope) -> float:
        """Return the distance by which the update moved a shard of the centre."""
        if envelope.is_refused or envelope.moved != AS_SENT:
            return envelope.moved * (not envelope.is_refused)
        return float(torch.linalg.vector_norm(self._update[part.begin : part.end]))
