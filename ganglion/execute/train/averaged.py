"""Replicas as workers of elastic averaging: each trains by itself, exchanges draw them together.

A rank exchanges its part of the model with the ranks that hold the same part of other replicas:
every element has its own force, so a worker may be a whole pipeline of split layers.

    worker 0   [stage 0] [stage 1]        each column is one group of `data`,
    worker 1   [stage 0] [stage 1]        each cell packs its weights and has a part of the centre

Asynchronous methods have one served centre for each column: by a thread of its first rank, or by
the server processes of the plan, each of which holds a part of every column's centre.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.decide.config import DEFAULT_BETA
from ganglion.decide.plan import (
    ASYNC_MODES,
    ASYNC_MSGD,
    ASYNC_SGD,
    DILOCO,
    ELASTIC,
    HOGWILD_SGD,
    LOCAL_SGD,
    MODE_OF_METHOD,
    SLOW_MOMENTUM,
    SYNC_EASGD,
    Plan,
)
from ganglion.execute.averaging import AveragingOptions, sync_method
from ganglion.execute.averaging.methods import (
    ExchangeMetrics,
    Method,
    OuterAveraging,
    OuterFactory,
    Packed,
    diloco,
    local_sgd,
    slow_momentum,
)
from ganglion.execute.averaging.served import (
    CenterHost,
    CountingStore,
    ServedSgd,
    announce_end,
    async_method,
)
from ganglion.execute.comm import Group, World

DEFAULT_CENTER_MOMENTUM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingSettings:
    """How replicas average: exactly one of alpha, beta and rho; beta = 0.9 without any.

    Only elastic methods have a rate. Exchanges happen every `tau` steps, beside forward and
    backward with `overlap`. `outer_lr` and `outer_momentum` are for slow_momentum and diloco; None
    for their defaults. `store`, `listen_on` and `timeout_s` are for a served centre.
    """

    alpha: float | None = None
    beta: float | None = None
    rho: float | None = None
    tau: int = 10
    overlap: bool = True
    unsafe: bool = False
    outer_lr: float | None = None
    outer_momentum: float | None = None
    center_momentum: float | None = None
    max_staleness: int | None = None
    store: CountingStore | None = None
    listen_on: str | None = None
    timeout_s: float = 300.0

    def options(self, plan: Plan) -> AveragingOptions:
        """Return the options of the method of a plan."""
        method = plan.averaging
        has_rate = any(rate is not None for rate in (self.alpha, self.beta, self.rho))
        momentum = self.center_momentum
        if method == ASYNC_MSGD and momentum is None:
            momentum = DEFAULT_CENTER_MOMENTUM
        # An exchange that starts before the forward cannot know the rate of the coming step.
        overlap = self.overlap and (self.rho is None or method == SYNC_EASGD)
        return AveragingOptions(
            mode=MODE_OF_METHOD[method],
            alpha=self.alpha,
            beta=DEFAULT_BETA if method in ELASTIC and not has_rate else self.beta,
            rho=self.rho,
            tau=self.tau,
            overlap=overlap,
            unsafe=self.unsafe,
            outer=self._outer(method),
            center_momentum=momentum or 0.0,
            max_staleness=self.max_staleness,
            servers=plan.servers,
        )

    def _outer(self, method: str) -> OuterFactory | None:
        given = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        known = {name: value for name, value in given.items() if value is not None}
        if method == SLOW_MOMENTUM:
            return slow_momentum(**known)
        if method == DILOCO:
            return diloco(**known)
        return local_sgd() if method == LOCAL_SGD else None


def average(
    tensors: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    plan: Plan,
    world: World,
    settings: AveragingSettings,
    position: int = 0,
) -> Averaged | None:
    """Return the averaging of tensors that some optimizers train; None if the plan has none.

    All ranks call it in the same order; `position` numbers the stages of a rank.
    """
    if not plan.averages:
        return None
    # Stages of a rank end their batches in different orders: each needs its own group.
    group = world.group("data", use=f"averaging {position}")
    if not optimizers:
        return None
    first = optimizers[0].param_groups[0]
    return Averaged(tensors, group, settings, plan, lambda: float(first["lr"]))


def all_are_made(plan: Plan, world: World, settings: AveragingSettings) -> None:
    """Announce to the servers of a plan that no more centres follow; all ranks call it."""
    if plan.servers:
        world.barrier()
        if world.rank == 0:
            assert settings.store is not None, "servers are found through a store"
            announce_end(settings.store)


class Averaged:
    """Some weights of a rank, and the method that averages them over workers."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        group: Group,
        settings: AveragingSettings,
        plan: Plan,
        lr: Callable[[], float],
    ) -> None:
        """Pack parameters and buffers, which must be the same in all workers of `group`."""
        self._packed = Packed(_holder(tensors))
        self._names = {_inner(name): name for name in tensors}
        self._group, self._options = group, settings.options(plan)
        self._host: CenterHost | None = None
        self._looked: Tensor | None = None  # a served centre, as it was last read
        self._velocity: Tensor | None = None  # and its velocity then, if it has momentum
        self._num_before = 0  # exchanges before this process started
        self._method = self._make(settings, lr)
        self.forget_outer()

    def _make(self, settings: AveragingSettings, lr: Callable[[], float]) -> Method:
        options, packed = self._options, self._packed
        if options.mode not in ASYNC_MODES:
            return sync_method(options, packed, self._group, lr())
        method, self._host = async_method(
            *(options, packed, self._group, lr, settings.timeout_s),
            *(settings.store, settings.listen_on),
        )
        return method

    def begin_pass(self) -> None:
        """Start an overlapped exchange: the forward of a batch begins."""
        self._method.begin_pass()

    def before_step(self, lr: float) -> None:
        """Take the force of an exchange: the optimizer is about to step."""
        self._method.before_step(lr)

    def after_step(self, lr: float) -> None:
        """Apply the force: the optimizer has stepped."""
        self._method.after_step(lr)

    def metrics(self) -> ExchangeMetrics:
        """Return the metrics of this worker's exchanges so far."""
        seen = self._method.metrics()
        return replace(seen, num_exchanges=seen.num_exchanges + self._num_before)

    def tensors(self) -> list[Tensor]:
        """Return the memory of averaging on this rank between steps, without the weights."""
        served = [] if self._host is None else self._host.tensors()
        return [*self._method.tensors(), *served]

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Give the modules the weights of the centre inside the block."""
        kept = self._packed.gather().clone()
        self._set(self._method.center())
        try:
            yield
        finally:
            self._set(kept)

    def center(self) -> dict[str, Tensor]:
        """Return the centre by the names of the tensors, as views that a load may fill."""
        if self._host is None:
            return self._named(self._method.center())
        if isinstance(self._method, ServedSgd):
            self._looked, self._velocity = self._method.moving_center()
        else:
            self._looked = self._method.center().clone()
        return self._named(self._looked)

    def outer_state(self) -> dict[str, Tensor]:
        """Return the momentum of the centre by the names of the tensors, if it has any.

        That of a served centre belongs to the last `center()`, which is called if none was.
        """
        if isinstance(self._method, ServedSgd):
            return self._served_velocity()
        if not isinstance(self._method, OuterAveraging):
            return {}
        entries, state = self._packed.entries, self._method.outer.state
        found = [state[p].get("momentum_buffer") for p in self._method.outer_parameters()]
        return {
            self._names[entry.name]: buffer
            for entry, buffer in zip(entries, found, strict=False)
            if buffer is not None
        }

    def _served_velocity(self) -> dict[str, Tensor]:
        if self._looked is None:
            self.center()
        if self._velocity is None:
            return {}
        return {
            self._names[entry.name]: entry.view(self._velocity)
            for entry in self._packed.entries
            if entry.offset < self._packed.num_trained
        }

    def forget_outer(self) -> None:
        """Set the momentum of the centre to zero, in memory that a load can fill."""
        if self._velocity is not None:
            self._velocity.zero_()
        if not isinstance(self._method, OuterAveraging):
            return
        for group in self._method.outer.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                zeros = torch.zeros_like(parameter)
                self._method.outer.state[parameter]["momentum_buffer"] = zeros

    def restart(self, step: int, num_exchanges: int, *, at_weights: bool) -> None:
        """Continue after `step` steps, with the centre at the present weights or where it is.

        A served centre is where the last `center()` was, which a load fills.
        """
        if self._host is not None:
            self._restart_served(self._host, step, num_exchanges, at_weights)
            return
        center = self._packed.gather() if at_weights else self._method.center()
        state = {**self._method.state_dict(), "center": center.clone()}
        self._method.load_state_dict({**state, "step": step, "version": num_exchanges})

    def _restart_served(
        self, host: CenterHost, step: int, num_exchanges: int, at_weights: bool
    ) -> None:
        center = self._packed.gather().to("cpu") if at_weights else self._looked
        assert center is not None, "a load asks for the centre first"
        center = center.clone()
        if self._options.mode in (ASYNC_SGD, HOGWILD_SGD):
            self._set(center)  # steps since the last exchange belong to no version
        self._group.barrier()
        host.restore(center, self._velocity)
        self._method.load_state_dict({"center": center, "step": step})
        self._group.barrier()
        self._num_before = num_exchanges - self._method.metrics().num_exchanges

    def close(self) -> None:
        """Finish what is in flight and release the method."""
        self._method.close()

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        views = self._packed.views(flat)
        return {self._names[inner]: view for inner, view in views.items()}

    def _set(self, flat: Tensor) -> None:
        self._packed.gather().copy_(flat)
        self._packed.scatter()


def _holder(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module with exactly these tensors."""
    holder = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(_inner(name), tensor)
        else:
            holder.register_buffer(_inner(name), tensor)
    return holder


def _inner(name: str) -> str:
    """Return a name without dots, which torch reserves for nested modules."""
    return name.replace(".", "/")
